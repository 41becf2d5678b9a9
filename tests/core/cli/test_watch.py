"""`ddp watch`: what it knows of a run from its directory, lines in a pipe, a table that fits, and its exit codes."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ddp_core.cli import watch as command
from ddp_core.cli.watch import WatchedRun, _look, table, watch_runs
from ddp_core.config.layout import Layout
from ddp_core.observe.metrics import MetricsWriter
from ddp_core.record.directory import RunDirectory
from ddp_core.record.lock import RunLock
from tests.core.observe.test_heartbeat import beat
from tests.support.records import EXPERIMENT, a_record, an_attempt
from tests.support.wording import refusing

TWO_RANKS = Layout(kind="ddp", nproc_per_node=2)


def begin(path: Path, *, layout: Layout | None = None, **fields: Any) -> RunDirectory:
    """A run of 100 steps that has written its record."""
    directory = RunDirectory(path)
    directory.checkpoints.mkdir(parents=True)
    known = {"attempts": [an_attempt(layout)], "total_steps": 100, "steps_per_epoch": 10}
    directory.write(a_record(EXPERIMENT.model_copy(update={"epochs": 10}), layout, **known | fields))
    return directory


def train(directory: RunDirectory, first: int, last: int) -> None:
    """Write the records of these steps, one a second, the last of which was made now; the loss of step N is 1/N."""
    with directory.metrics.open("a") as file:
        for step in range(first, last + 1):
            record = {"kind": "step", "time": time.time() - (last - step), "step": step, "loss": 1 / step}
            file.write(json.dumps(record | {"samples_per_second": 80.0}) + "\n")


def note(directory: RunDirectory, kind: str, **fields: Any) -> None:
    with MetricsWriter(directory.metrics) as metrics:
        metrics.write(kind, **fields)


def let_pass(directory: RunDirectory, seconds: float) -> None:
    """Make all files of the run older."""
    for file in directory.path.rglob("*"):
        if file.is_file():
            os.utime(file, (time.time() - seconds, time.time() - seconds))


def pid_of_the_dead() -> int:
    ended = multiprocessing.get_context("fork").Process(target=int)
    ended.start()
    ended.join()
    assert ended.pid is not None
    return ended.pid


def at_work(output: Path) -> RunDirectory:
    directory = begin(output / "mine" / "run", layout=TWO_RANKS)
    train(directory, 1, 40)
    note(directory, "evaluation", step=40, epoch=3, test_loss=0.5, test_accuracy=0.75)
    for rank in range(12):
        beat(directory.path, rank, step=40, mean_seconds=0.01 if rank < 11 else 0.05, node_rank=rank // 2)
    directory.log.write_text("2026-01-01T00:00:00Z all is well\n2026-01-01T00:00:01Z warning: mind the gap\n")
    return directory


def test_a_growing_run_is_seen_and_a_resumed_one_forgets_what_was_rolled_back(tmp_path: Path) -> None:
    directory = begin(tmp_path / "run")
    with RunLock(directory.path):
        assert (WatchedRun(directory).state, WatchedRun(directory).step) == ("starting", 0)
        train(directory, 1, 5_001)
        with directory.metrics.open("ab") as file:
            file.write(b'\n\xff\xfe\n[]\n{}\n{"kind": "step", "step": 999, "lo')
        run = WatchedRun(directory)
        assert (run.state, run.step, run.last["step"]["loss"]) == ("running", 5_001, 1 / 5_001)
        assert run.seconds_per_step == pytest.approx(1.0, rel=0.01)
        note(directory, "resume", step=10)
        assert (WatchedRun(directory).step, WatchedRun(directory).seconds_per_step) == (10, 0)


def test_silence_names_the_rank_that_is_lost(tmp_path: Path) -> None:
    directory = begin(tmp_path / "run", layout=TWO_RANKS)
    beat(directory.path, 0, step=30)
    beat(directory.path, 1, step=30)
    let_pass(directory, 40)
    with RunLock(directory.path):
        assert WatchedRun(directory).standing() == "no step for 40 s"
        beat(directory.path, 1, step=31)
        assert WatchedRun(directory).state == "running"
    beat(directory.path, 1, step=31, pid=pid_of_the_dead())
    let_pass(directory, 40)
    assert WatchedRun(directory).standing() == "no step for 40 s, rank 1 is gone"


def test_a_killed_run_is_interrupted_at_once_where_nothing_starts_it_again(tmp_path: Path) -> None:
    alone, of_ranks = begin(tmp_path / "alone"), begin(tmp_path / "ranks", layout=TWO_RANKS)
    for directory in (alone, of_ranks):
        beat(directory.path, 0, step=30, pid=pid_of_the_dead())
    assert WatchedRun(alone).state == "interrupted"
    assert (WatchedRun(of_ranks).state, WatchedRun(of_ranks).is_over) == ("silent", False)
    let_pass(of_ranks, 1000)
    assert WatchedRun(of_ranks).state == "interrupted"


def test_lines_in_a_pipe_end_with_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = begin(tmp_path / "run")
    train(directory, 1, 10)

    def a_second_later(_: float) -> None:
        if directory.read()["status"] == "running":
            train(directory, 11, 20)
            directory.log.write_text("2026-01-01T00:00:00Z warning: mind the gap\n")
            record = directory.read()
            attempts = [*record["attempts"], record["attempts"][0]]
            directory.update(status="failed", exit_code=5, message="the loss is NaN in step 21", attempts=attempts)

    monkeypatch.setattr(command.time, "sleep", a_second_later)
    with RunLock(directory.path):
        assert watch_runs(directory.path, once=False, seconds=10) == 5
    lines = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("single-cpu, running, step 10 of 100 (10 %)  loss 0.1000")
    assert lines[1:4] == ["warning: mind the gap", "attempt 2 on single-cpu", "failed: the loss is NaN in step 21"]
    assert lines[4].startswith("step 20 of 100")
    assert len(lines) == 5


ENDED = {
    "completed": (0, {"exit_code": 0, "weights_sha256": "a" * 64, "result": {"steps": 100}}),
    "stopped": (75, {"exit_code": 75, "message": "stopped by SIGTERM"}),
    "failed": (4, {"exit_code": 4, "message": "no space left"}),
    "running": (6, {}),  # its files are old, and no process is left
}


@pytest.mark.parametrize("status", ENDED)
def test_the_exit_code_is_that_of_the_run(tmp_path: Path, status: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, fields = ENDED[status]
    let_pass(begin(tmp_path / "mine" / "run", status=status, **fields), 60)
    assert watch_runs(tmp_path, once=False, seconds=10) == code
    assert watch_runs(tmp_path / "mine" / "run", once=True, seconds=10) == code
    assert capsys.readouterr().out.count("mine/run: single-cpu, ") == 2


def test_only_what_is_at_work_is_watched_or_else_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = {"status": "completed", "exit_code": 0, "weights_sha256": "a" * 64, "result": {"steps": 100}}
    begin(tmp_path / "mine" / "old", started_at="2026-01-01T00:00:00Z", **done)
    begin(tmp_path / "mine" / "new", started_at="2026-01-02T00:00:00Z", **done)
    runs = _look(tmp_path, False, [], 0)
    assert [run.directory.path.name for run in runs] == ["new"]
    live = begin(tmp_path / "mine" / "live", started_at="2026-01-03T00:00:00Z")
    (tmp_path / "mine" / "bad").mkdir()
    (tmp_path / "mine" / "bad" / "run.json").write_text("{")
    with RunLock(live.path):
        runs = _look(tmp_path, False, [], 0)
        assert [run.directory.path.name for run in runs] == ["live"]
        assert capsys.readouterr().err.count("bad is not a run directory") == 1
        later = begin(tmp_path / "mine" / "later", started_at="2026-01-04T00:00:00Z")
        with RunLock(later.path):
            runs = _look(tmp_path, False, runs, 5)
            assert [run.directory.path.name for run in runs] == ["live", "later"]
        (later.path / "run.json").unlink()
        assert [run.directory.path.name for run in _look(tmp_path, False, runs, 6)] == ["live"]


def test_nothing_to_watch_is_one_line(tmp_path: Path) -> None:
    with refusing():
        watch_runs(tmp_path, once=False, seconds=10)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with refusing():
        watch_runs(tmp_path / "run", once=False, seconds=10)


def test_ctrl_c_leaves_the_run_and_its_files_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    directory, shown = at_work(tmp_path), StringIO()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(command, "Console", lambda: Console(file=shown, width=160, force_terminal=True))
    monkeypatch.setattr(command.time, "sleep", interrupt)
    with RunLock(directory.path):
        before = {file: file.stat().st_mtime_ns for file in directory.path.rglob("*")}
        try:
            assert watch_runs(tmp_path, once=False, seconds=10) == 0
        except KeyboardInterrupt:
            pytest.fail("Ctrl-C goes through")
        assert {file: file.stat().st_mtime_ns for file in directory.path.rglob("*")} == before
    assert "step 40 of 100" in shown.getvalue()


@pytest.mark.parametrize("width", [40, 200])
def test_a_table_has_runs_their_ranks_and_what_to_mind(tmp_path: Path, width: int) -> None:
    console = Console(file=StringIO(), width=width)
    console.print(table([WatchedRun(at_work(tmp_path))]))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in text.splitlines())
    assert text.isascii(), "a terminal may have no Unicode"
    if width == 200:
        for part in ("running", "step 40 of 100 (40 %)", "about 1 min left", "loss 0.0250", "0.7500", "mind the gap"):
            assert part in text
