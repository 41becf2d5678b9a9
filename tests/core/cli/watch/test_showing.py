"""What `ddp watch` shows: lines in a pipe, a picture that fits a terminal, and its exit codes."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ddp_core.base.errors import UserError
from ddp_core.cli.watch import watch as command
from ddp_core.cli.watch.finding import Watched
from ddp_core.cli.watch.run import WatchedRun
from ddp_core.cli.watch.view import picture
from ddp_core.cli.watch.watch import watch_runs
from ddp_core.record.lock import RunLock
from tests.core.cli.watch.growing import TWO_RANKS, beat, begin, note, train
from tests.support.commands import ROOT, forked, running, wait_until
from tests.support.processes import HANG


def at_work(output: Path, name: str, **fields: Any) -> WatchedRun:
    directory = begin(output / "mine" / name, layout=TWO_RANKS, **fields)
    train(directory, 1, 40)
    note(directory, "evaluation", step=40, epoch=3, test_loss=0.5, test_accuracy=0.75)
    note(directory, "checkpoint", step=40, seconds=0.1)
    for rank in range(12):
        beat(directory, rank, step=40, mean=0.01 if rank else 0.05, node_rank=rank // 2)
    directory.log.write_text("2026-01-01T00:00:00Z warning: a long warning that says what one should mend, and where\n")
    run = WatchedRun(directory)
    run.look()
    return run


def drawn(runs: list[WatchedRun], width: int, height: int, whole: bool = False, **how: Any) -> list[str]:
    console = Console(file=StringIO(), width=width, height=height, **how)
    console.print(picture(runs, [], console, whole=whole))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.splitlines()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_picture_fits_its_terminal(tmp_path: Path, width: int) -> None:
    runs = [at_work(tmp_path, f"run-{number}") for number in range(5)]
    for count, height in ((1, 30), (1, 5), (5, 30), (5, 4)):
        lines = drawn(runs[:count], width, height)
        assert len(lines) <= height
        assert all(len(line) <= width for line in lines)
    alone = " ".join(drawn(runs[:1], width, 40))
    for part in (
        "running",
        "step 40 of 100",
        "epoch 4",
        "40 %",
        "about 1 min left",
        "loss 1",
        "0.7500",
        "rank 0",
        "mend",
    ):
        assert part in alone
    assert sum(" ".join(drawn(runs, width, 60)).count(part) for part in ("running", "40 %")) == 10


def test_a_terminal_without_unicode_is_drawn_in_ascii(tmp_path: Path) -> None:
    run = at_work(tmp_path, "run")
    console = Console(file=open(os.devnull, "w", encoding="ascii"), width=80, height=30)  # noqa: PTH123, SIM115
    with console.capture() as captured:
        console.print(picture([run], [], console))
    console.file.close()
    assert captured.get().isascii()


def test_lines_in_a_pipe_end_with_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = begin(tmp_path / "run")
    train(directory, 1, 10)

    def a_second_later(_: float) -> None:
        if directory.read()["status"] == "running":
            train(directory, 11, 20)
            directory.log.write_text("2026-01-01T00:00:00Z warning: mind the gap\n")
            directory.update(status="failed", exit_code=5, message="the loss is NaN in step 21")

    monkeypatch.setattr(command.time, "sleep", a_second_later)
    with RunLock(directory.path):
        assert watch_runs(directory.path, once=False, seconds=10) == 5
    lines = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("single-cpu, running, step 10 of 100 (10 %)  loss 0.1000")
    assert lines[1:3] == ["warning: mind the gap", "failed: the loss is NaN in step 21"]
    assert lines[3].startswith("step 20 of 100")
    assert len(lines) == 4


ENDED = {
    "completed": (0, {"exit_code": 0, "weights_sha256": "a" * 64, "result": {"steps": 100}}),
    "stopped": (75, {"exit_code": 75, "message": "stopped by SIGTERM"}),
    "failed": (4, {"exit_code": 4, "message": "no space left"}),
    "running": (6, {}),  # a minute ago, and no process is left
}


@pytest.mark.parametrize("status", ENDED)
def test_the_exit_code_is_that_of_the_run(tmp_path: Path, status: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, fields = ENDED[status]
    begin(tmp_path / "mine" / "run", status=status, **fields)
    assert watch_runs(tmp_path, once=False, seconds=10) == code
    assert watch_runs(tmp_path / "mine" / "run", once=True, seconds=10) == code
    assert capsys.readouterr().out.count("mine/run: single-cpu, ") == 2


def test_only_what_is_at_work_is_watched_or_else_the_newest(tmp_path: Path) -> None:
    done = {"status": "completed", "exit_code": 0, "weights_sha256": "a" * 64, "result": {"steps": 100}}
    begin(tmp_path / "mine" / "old", ago=900, **done)
    begin(tmp_path / "mine" / "new", ago=800, **done)
    problems: list[str] = []
    assert [run.directory.path.name for run in Watched(tmp_path, problems.append).runs] == ["new"]
    live = begin(tmp_path / "mine" / "live")
    (tmp_path / "mine" / "bad").mkdir()
    (tmp_path / "mine" / "bad" / "run.json").write_text("{")
    with RunLock(live.path):
        watched = Watched(tmp_path, problems.append)
        assert [run.directory.path.name for run in watched.runs] == ["live"]
        assert len(problems) == 1
        assert "bad is not a run directory" in problems[0]
        later = begin(tmp_path / "mine" / "later")
        with RunLock(later.path):
            watched._next_search = 0.0
            assert [run.directory.path.name for run, _ in watched.look()] == ["live", "later"]
        shutil.rmtree(later.path)
        assert [run.directory.path.name for run, _ in watched.look()] == ["live"]
        assert len(problems) == 2


def test_nothing_to_watch_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no runs in"):
        watch_runs(tmp_path, once=False, seconds=10)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="not a run directory"):
        watch_runs(tmp_path / "run", once=False, seconds=10)


@pytest.mark.slow
def test_a_real_run_is_watched_in_a_pipe(tmp_path: Path) -> None:
    words = ("train", "digits", "--layout", "ddp", "--nproc-per-node", "2", "--device", "cpu", "--output", tmp_path)
    with forked(*words, "--set", "epochs=2") as training:
        wait_until(lambda: bool(list(tmp_path.glob("*/*/run.json"))), HANG, "the run has begun")
        with running("watch", tmp_path, "--every", "0") as watching:
            assert training.end().code == 0
            output, errors = watching.communicate(timeout=HANG)
    assert (watching.returncode, errors) == (0, "")
    assert "step 44 of 44 (100 %)" in output
    assert "completed after 44 steps" in output


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_ctrl_c_leaves_the_view_and_nothing_else(tmp_path: Path) -> None:
    run = at_work(tmp_path, "run")
    shown, terminal = pty.openpty()
    with RunLock(run.directory.path):
        watching = subprocess.Popen(
            [sys.executable, "-m", "ddp_core", "watch", str(tmp_path)],
            stdout=terminal,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
            cwd=ROOT,
        )
        os.close(terminal)
        text = ""
        while "step 40 of 100" not in text:
            text += os.read(shown, 65536).decode()
        watching.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the other end is closed
            while more := os.read(shown, 65536):
                text += more.decode()
        assert watching.wait() == 0
        os.close(shown)
        assert run.look() == []
