"""Trainings on unlike CPUs: what is kept of them, and the page that is made of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_core.experiment.file import INSTALLED, list_experiments
from ddp_lab.probe.published import published
from tools import machines_seen, portable_runs

CODE = {"version": "1.0", "commit": "c" * 40, "dirty": False}


def record(cpu: str, digest: str, emulator: str | None = None, torch: str = "2.13.0+cpu") -> dict[str, Any]:
    return {
        "format": 1,
        "command": "ddp train toy_mlp",
        "weights_sha256": digest * 64,
        "cpu": cpu,
        "emulator": emulator,
        "date": "2026-11-25",
        "code": CODE,
        "versions": {"torch": torch},
    }


def test_a_row_names_all_cpus_that_ended_alike() -> None:
    rows = portable_runs.table([record("A", "a"), record("B", "a", "qemu")]).splitlines()[2:]
    on = "A (2026-11-25, cccccccc); B, emulated (2026-11-25, cccccccc)"
    assert rows == [f"| `ddp train toy_mlp` | 2.13.0 | `{'a' * 12}…` | {on} |"]


def test_other_weights_are_said() -> None:
    alike = [record("A", "a"), record("B", "a", torch="2.13.0+cu130"), record("C", "b", torch="2.14.0")]
    assert portable_runs.differences(alike) == []
    (line,) = portable_runs.differences([*alike, record("D", "d")])
    assert line == f"ddp train toy_mlp (torch 2.13.0) differs: {'a' * 12} on A, B; {'d' * 12} on D"


def test_a_later_record_takes_the_place_of_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable_runs, "KEPT", tmp_path / "runs.json")
    for each in (record("A", "a"), record("B", "a", "qemu"), record("A", "b")):
        portable_runs.keep(each)
    kept = json.loads(portable_runs.KEPT.read_text())
    assert [(each["cpu"], each["weights_sha256"][0]) for each in kept] == [("B", "a"), ("A", "b")]


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Trainings are played by processes that write a run's record, but that of `digits` fails; the file of records."""

    def command(name: str, cpu: str, output: Path) -> list[str]:
        fails = "sys.exit('error: no room')" if name == "digits" else f"print({cpu!r})"
        return [sys.executable, "-S", "-c", f"import sys; {fails}"]

    monkeypatch.setattr(portable_runs, "KEPT", tmp_path / "runs.json")
    monkeypatch.setattr(portable_runs, "_command", command)
    monkeypatch.setattr(portable_runs, "find_runs", lambda output: iter([(output, {"weights_sha256": "a" * 64})]))
    monkeypatch.setattr(portable_runs, "version", lambda: "7.2.22")
    monkeypatch.setattr(portable_runs, "is_same", lambda code, here: code == here)
    return portable_runs.KEPT


def test_a_training_that_fails_is_said_and_the_others_are_kept(
    played: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [("digits", "Haswell"), ("toy_mlp", "Haswell"), ("toy_mlp", "here")]
    assert portable_runs.train(asked, 1, CODE) == 1
    assert [(each["experiment"], each["emulator"]) for each in json.loads(played.read_text())] == [
        ("toy_mlp", "qemu-x86_64 7.2.22"),
        ("toy_mlp", None),
    ]
    assert "digits" in (said := capsys.readouterr().err)
    assert said.endswith("ended with 1: error: no room\n")


def test_what_the_same_code_has_recorded_is_known(played: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    portable_runs.train([("toy_mlp", "Haswell")], 1, CODE)
    assert portable_runs.is_recorded("toy_mlp", "Haswell", CODE)
    assert not portable_runs.is_recorded("toy_mlp", "here", CODE)
    assert not portable_runs.is_recorded("digits", "Haswell", CODE)
    assert not portable_runs.is_recorded("toy_mlp", "Haswell", CODE | {"commit": "d" * 40})
    monkeypatch.setitem(portable_runs.TRAININGS, "toy_mlp", ("max_steps=1",))
    assert not portable_runs.is_recorded("toy_mlp", "Haswell", CODE), "another cut is another training"


def test_each_shipped_experiment_that_needs_no_download_is_trained() -> None:
    assert portable_runs.TRAININGS.keys() == published().training_steps.keys()
    assert portable_runs.TRAININGS.keys() <= {each.name for each in list_experiments([INSTALLED])}


def test_what_is_kept_agrees_and_is_on_the_page() -> None:
    kept = json.loads(portable_runs.KEPT.read_text())
    page = machines_seen.PAGE.read_text()
    assert portable_runs.differences(kept) == []
    assert portable_runs.table(kept) in page
    assert {field for each in kept for field in each} <= set(machines_seen_words(page)), "documented"


def machines_seen_words(page: str) -> list[str]:
    return page.replace("`", " ").replace(",", " ").split()
