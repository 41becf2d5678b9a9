"""The run's directory: made, found, read while it is written, and never taken from a process that works in it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.checkpoint import Checkpointer
from ddp_core.cli import main
from ddp_core.config.layout import Layout
from ddp_core.config.options import Asked, Options
from ddp_core.experiment.file import LoadedExperiment
from ddp_core.experiment.request import Request
from ddp_core.record.continuing import find_resumable, require_continuable
from ddp_core.record.directory import RunDirectory, find_launch, find_runs, pass_over
from ddp_core.record.lock import RunLock
from tests.support.records import EXPERIMENT, a_record
from tests.support.wording import refusing


def make(output: Path, started_at: str = "2026-01-01T00:00:00Z", **fields: Any) -> RunDirectory:
    directory = RunDirectory.create(output, EXPERIMENT, Layout())
    directory.write(a_record(started_at=started_at, **fields))
    return directory


def request(output: Path) -> Request:
    loaded = LoadedExperiment(EXPERIMENT, {}, Path("mine.py"), "", "")
    return Request(loaded, Layout(), Options(output=str(output)), "auto")


def test_a_directory_is_named_by_experiment_layout_time_and_an_id(tmp_path: Path) -> None:
    one, other = (RunDirectory.create(tmp_path, EXPERIMENT, Layout(kind="ddp", nproc_per_node=2)) for _ in range(2))
    assert one.path != other.path
    assert one.path.parent == tmp_path / "mine"
    assert one.path.name.startswith("ddp-1x2-cpu-20")
    assert one.checkpoints.is_dir()
    assert {one.metrics.name, one.log.name} == {"metrics.jsonl", "log.txt"}


def test_a_record_is_strict_json(tmp_path: Path) -> None:
    directory = make(tmp_path, result={"steps": 3, "test_loss": float("inf"), "values": [float("nan"), 0.5]})
    assert not re.search("NaN|Infinity", (directory.path / "run.json").read_text())
    assert directory.read()["result"] == {"steps": 3, "test_loss": None, "values": [None, 0.5]}


def test_an_output_that_cannot_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with refusing():
        RunDirectory.create(tmp_path / "file" / "outputs", EXPERIMENT, Layout())
    with refusing():
        RunDirectory(tmp_path / "gone").write({})


def test_a_folder_with_checkpoints_and_no_record_is_told(tmp_path: Path) -> None:
    begun, lost = (RunDirectory.create(tmp_path, EXPERIMENT, Layout()) for _ in range(2))
    (lost.checkpoints / "step-4.json").write_text("{}")
    told: list[tuple[Path, str]] = []
    for place in (tmp_path, lost.path):
        assert list(find_runs(place, lambda directory, problem: told.append((directory.path, problem)))) == []
    problem = f"{lost.path} is not a run directory: it has no readable run.json (No such file or directory)"
    assert told == [(lost.path, problem)] * 2
    assert begun.path.is_dir()


def test_an_update_changes_what_it_names(tmp_path: Path) -> None:
    directory = make(tmp_path, launch_id="a")
    directory.update(status="failed", exit_code=2)
    assert directory.read() == a_record(launch_id="a", status="failed", exit_code=2)
    assert [path.name for path in directory.path.glob(".run*")] == []
    (directory.path / "plain").touch()
    assert (directory.path / "run.json").stat().st_mode == (directory.path / "plain").stat().st_mode


def test_runs_are_found_oldest_first_at_any_depth(tmp_path: Path) -> None:
    late, early = make(tmp_path, "2026-02-01T00:00:00Z"), make(tmp_path, "2026-01-01T00:00:00Z")
    (tmp_path / "mine" / "broken").mkdir()
    (tmp_path / "mine" / "broken" / "run.json").write_text("{")
    assert [run.path for run, _ in find_runs(tmp_path)] == [early.path, late.path]
    assert [run.path for run, _ in find_runs(late.path)] == [late.path]
    assert list(find_runs(tmp_path / "nothing")) == []


BAD = {
    "empty": b"",
    "not UTF-8": b"\xff",
    "deep": b"[" * 100_000,
    "list": b"[]",
    "another format": b'{"format": "ddp-run/99"}',
    **{
        f"{name} {value!r}": json.dumps(a_record() | {name: value}).encode()
        for name, values in {
            "attempts": ([], {}, [7]),
            "result": ([], None, {"seconds": "long"}),
            "experiment": ([], {"name": 5}),
            "layout": ([], {"kind": "tp"}),
            "options": (None, {"reduction": []}),
            "status": ("done", "completed"),
            "started_at": (None, 5),
        }.items()
        for value in values
    },
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_a_bad_record_is_passed_over_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    good, bad = make(tmp_path, launch_id="a"), make(tmp_path)
    (bad.path / "run.json").write_bytes(content)
    with pytest.raises(UserError, match=r"no readable run\.json") as refused:
        bad.read()
    assert refused.value.exit_code == ExitCode.BAD_INPUT
    line = f"ddp: warning: passed over: {refused.value}\n"
    assert line.count("\n") == 1
    found = find_resumable(request(tmp_path), 64)
    assert found is not None
    assert (found.path, capsys.readouterr().err) == (good.path, line)
    assert find_launch(tmp_path, EXPERIMENT, "nobody's") is None
    found = find_launch(tmp_path, EXPERIMENT, "a", pass_over)
    assert found is not None
    assert (found.path, capsys.readouterr().err) == (good.path, line)
    assert main(["compare", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().err == line
    assert main(["compare", str(good.path), str(bad.path)]) == 2
    assert capsys.readouterr().err == f"ddp: error: {refused.value}\n"


@pytest.mark.parametrize("status", ["running", "failed", "stopped"])
def test_the_newest_unfinished_run_is_resumed(tmp_path: Path, status: str) -> None:
    make(tmp_path, "2026-01-01T00:00:00Z", status=status)
    newest = make(tmp_path, "2026-01-02T00:00:00Z", status=status)
    make(tmp_path, "2026-01-03T00:00:00Z", status="completed")
    other = EXPERIMENT.model_copy(update={"epochs": 9})
    make(tmp_path, "2026-01-04T00:00:00Z", experiment=other)
    found = find_resumable(request(tmp_path), 64)
    assert found is not None
    assert found.path == newest.path


def test_checkpoints_without_a_record_are_not_passed_over(tmp_path: Path) -> None:
    lost = make(tmp_path, "2026-01-02T00:00:00Z")
    make(tmp_path, "2026-01-01T00:00:00Z")
    (lost.path / "run.json").write_bytes(b"")
    assert find_resumable(request(tmp_path), 64) is not None
    with Checkpointer(lost.checkpoints) as checkpointer:
        checkpointer.save({}, step=30, epoch=0)
    with refusing():
        find_resumable(request(tmp_path), 64)


def test_a_run_that_somebody_works_on_is_not_resumed(tmp_path: Path) -> None:
    directory = make(tmp_path)
    with RunLock(directory.path):
        assert directory.is_worked_in
        with pytest.raises(
            UserError, match=f"another run is using {directory.path}: .*since .*--resume never"
        ) as raised:
            find_resumable(request(tmp_path), 64)
        assert raised.value.exit_code == ExitCode.BAD_INPUT
    assert not directory.is_worked_in
    assert find_resumable(request(tmp_path), 64) is not None


WEIGHTS = {"given": "w.pt", "file": "/w.pt", "sha256": "0" * 64}


@pytest.mark.parametrize("status", ["stopped", "completed"])
@pytest.mark.parametrize(("began_with", "asked_for"), [(WEIGHTS, None), (None, "w.pt")])
def test_a_run_that_began_with_other_weights_is_not_continued(
    tmp_path: Path, began_with: dict[str, str] | None, asked_for: str | None, status: str
) -> None:
    directory = make(tmp_path, status=status, init_from=began_with, result={"steps": 1})
    asked = replace(request(tmp_path), asked=Asked(experiment="mine.py", init_from=asked_for))
    assert find_resumable(asked, 64) is None
    with refusing():
        require_continuable(directory, asked, 64)
