"""Which published digests emulated CPUs reproduce: kept after each CPU, and not asked again of the same code."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ddp_lab.probe.published import Published, Steps
from tests.support.wording import refusing
from tools import confirmation
from tools.emulation import CPUS, FAULTS

CODE = {"version": "1.0", "commit": "c" * 40, "dirty": False}


def table(confirmed_by: Sequence[confirmation.Confirmation] = ()) -> Published:
    """A table of five operations and two short trainings."""
    return Published(
        rules=2,
        torch="2.13.0",
        numpy="2.4.6",
        made_on={"cpu": "a CPU", "date": "2026-01-01"},
        operations={f"operation {number}": "a" * 64 for number in range(5)},
        training_steps={name: Steps(["max_steps=2"], "b" * 64) for name in ("digits", "counter_buffer")},
        runs={},
        confirmed_by=tuple(confirmed_by),
    )


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of a CPU is played by a process that says 3 digests agree; one of Haswell's differs."""

    def command(cpu: str, part: int) -> list[str]:
        different = {"sum": "operation sum: published a, here b"} if (cpu, part) == ("Haswell", 1) else {}
        said = json.dumps({"reproduced": 3, "different": different})
        return [sys.executable, "-S", "-c", f"print({said!r})"]

    monkeypatch.setattr(confirmation, "_command", command)
    monkeypatch.setattr(confirmation, "emulator", lambda: "/usr/bin/qemu-x86_64")
    monkeypatch.setattr(confirmation, "version", lambda: "7.2.22")
    monkeypatch.setattr(confirmation, "code_here", lambda: CODE)
    monkeypatch.setattr(confirmation, "is_same", lambda code, here: code == here)


def kept_of(whole: Published) -> list[Published]:
    kept: list[Published] = []
    confirmation.confirm(whole, kept.append)
    return kept


def test_the_parts_have_each_name_once() -> None:
    parts = [confirmation.part_of(table(), part, 2) for part in range(2)]
    operations = [name for part in parts for name in part.operations]
    trainings = [name for part in parts for name in part.training_steps]
    assert sorted(operations) == sorted(table().operations)
    assert sorted(trainings) == sorted(table().training_steps)
    assert [len(part.operations) for part in parts] == [3, 2]


def test_the_table_is_kept_after_each_cpu_with_what_its_parts_found() -> None:
    kept = kept_of(table())
    assert [len(each.confirmed_by) for each in kept] == [1, 2, 3]
    first, *_ = kept[-1].confirmed_by
    assert {each["cpu"] for each in kept[-1].confirmed_by} == set(CPUS)
    assert (first["cpu"], first["reproduced"], list(first["different"])) == ("Haswell", 6, ["sum"])
    assert (first["emulator"], first["code"], first["not_tried"]) == ("qemu-x86_64 7.2.22", CODE, FAULTS)


def test_a_cpu_is_asked_anew_by_other_code_or_another_emulator_alone() -> None:
    whole = kept_of(table())[-1]
    assert kept_of(whole) == []
    haswell, skylake, rome = whole.confirmed_by
    older = [haswell, {**skylake, "code": {**CODE, "commit": "d" * 40}}, {**rome, "emulator": "qemu-x86_64 9.0.0"}]
    kept = kept_of(replace(whole, confirmed_by=tuple(older)))
    assert len(kept) == 2
    assert kept[-1] == whole


def test_a_probe_that_fails_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [sys.executable, "-S", "-c", "raise SystemExit('no torch here')"]
    monkeypatch.setattr(confirmation, "_command", lambda *_: failing)
    with refusing():
        confirmation.confirm(table(), lambda _: None)
