"""What a run writes: whole JSON lines, steps rolled back by a resume, and which ranks may write to the console."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pty
import re
import sys
import tempfile
import termios
from pathlib import Path

import pytest

from ddp_core.checkpoint import Fence, Superseded
from ddp_core.distributed.reports import tell_user
from ddp_core.observe.metrics import Console, MetricsWriter, read_metrics
from tests.support.mounts import tmpfs
from tests.support.processes import ask


def test_what_json_has_no_word_for_becomes_null(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m") as metrics:
        metrics.write("step", step=1, loss=math.nan, lr=math.inf, low=-math.inf, one=1.0)
    (record,) = (json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "m").read_text().splitlines())
    assert (record["loss"], record["lr"], record["low"], record["one"]) == (None, None, None, 1.0)


def test_two_resumes_roll_back_as_one_after_the_other_does(tmp_path: Path) -> None:
    path = tmp_path / "m"
    written = [("step", 1), ("step", 2), ("resume", 2), ("step", 3), ("resume", 1), ("step", 2), ("resume", 2)]
    with MetricsWriter(path) as metrics:
        for kind, step in written:
            metrics.write(kind, step=step)
    found = [(record["kind"], record["step"]) for record in read_metrics(path)]
    assert found == [("step", 1), ("resume", 1), ("step", 2), ("resume", 2)]


def test_whoever_goes_on_after_a_step_repeats_none_of_its_records(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with MetricsWriter(path) as metrics:
        for step in (1, 2, 3):
            metrics.write("step", step=step)
        metrics.write("evaluation", step=2)
    with MetricsWriter(path) as metrics:
        assert metrics.go_on(2, ranks=3) == 3, "the newest step that was recorded before"
        metrics.write("evaluation", step=2)
        metrics.write("digest", step=2)
        metrics.write("step", step=3)
    kept = [(record["kind"], record["step"]) for record in read_metrics(path)]
    assert kept == [("step", 1), ("step", 2), ("evaluation", 2), ("resume", 2), ("digest", 2), ("step", 3)]
    assert [record["ranks"] for record in read_metrics(path, "resume")] == [3]
    with MetricsWriter(path) as metrics:
        assert metrics.go_on(3) == 3


@pytest.mark.parametrize(
    "rest", ['{"kind": "step", "st', "\x00\x00\x00", '"a string"', "[1, 2]", '{"kind": "resume", "step": "x"}']
)
def test_a_half_written_or_foreign_line_is_left_out(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "m"
    with MetricsWriter(path) as metrics:
        metrics.write("step", step=1)
    with path.open("a") as file:
        file.write(rest)
    assert [record["step"] for record in read_metrics(path)] == [1]


def test_rank_zero_speaks_and_keeps_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(0, 4)
    console.log_to(tmp_path / "log.txt")
    console.say("hello")
    console.warn("careful")
    console.close()
    captured = capsys.readouterr()
    assert captured.out == "hello\n"
    assert captured.err == "warning: careful\n"
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.partition(" ")[2] for line in lines] == ["hello", "warning: careful"]


def test_the_log_is_left_alone_once_another_process_has_taken_the_run_over(tmp_path: Path) -> None:
    console, former = Console(), Fence.take(tmp_path)
    console.log_to(tmp_path / "log.txt", former.check)
    console.say("mine")
    Fence.take(tmp_path)
    with pytest.raises(Superseded):
        console.say("of one that woke up")
    console.close()
    assert "woke" not in (tmp_path / "log.txt").read_text()


def test_without_a_terminal_a_line_breaks_a_long_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    console = Console()
    console.log_to(tmp_path / "log.txt")
    assert not console.draws
    for step in range(1, 301):  # a step every two seconds; a line is said at step 250
        now += 2
        if step == 250:
            console.say("an epoch")
        console.progress(step, 3000, 0.5 if step > 1 else math.nan)
    console.close()
    output, errors = capsys.readouterr()
    said = [int(line.split()[1]) for line in output.splitlines() if line.startswith("step")]
    assert said == [*range(31, 249, 31), 281], "at most a line a minute, and none soon after another"
    assert output.splitlines()[0] == "step     31 of 3000  loss 0.5000  about 1 h 39 min left"
    assert errors == ""
    assert "step     31 of 3000" in (tmp_path / "log.txt").read_text()


def test_the_bar_moves_from_the_first_step() -> None:
    """A run on a terminal of its own, whose losses are read and recorded only every 1000 steps."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    words = ["train", "toy_mlp", "--device", "cpu", "--set", "epochs=3", "--log-every", "1000", "--fault", "slow@1:0"]
    assert ask(train_on_terminal, os.ttyname(theirs), words) == 0
    os.set_blocking(ours, False)
    drawn = b""
    with contextlib.suppress(BlockingIOError):
        while part := os.read(ours, 1 << 16):
            drawn += part
    assert re.search(r"\b1/6 ", drawn.decode()), drawn
    assert "loss" in drawn.decode()
    os.close(ours)
    os.close(theirs)


def train_on_terminal(terminal: str, words: list[str]) -> int:
    from ddp_core.cli import main

    device = os.open(terminal, os.O_RDWR)
    os.dup2(device, 2)
    with tempfile.TemporaryDirectory() as output:
        return main([*words, "--output", output])


def test_a_line_that_a_full_disk_has_cut_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write("step", step=1)
        metrics.write("step", step=2)
    with path.open("a") as file:
        file.write('{"kind": "step", "st')
    with MetricsWriter(path) as metrics:
        metrics.write("resume", step=1)
        metrics.write("step", step=2)
    assert '"st{' not in path.read_text().replace("\n", "")
    assert [(record["kind"], record["step"]) for record in read_metrics(path)] == [
        ("step", 1),
        ("resume", 1),
        ("step", 2),
    ]


def test_a_record_that_a_full_disk_has_no_room_for_names_its_file(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "size=4k") as small:
        named = pytest.raises(OSError, match=f"No space left on device: '{small}/metrics.jsonl'")
        with named, MetricsWriter(small / "metrics.jsonl") as metrics:
            metrics.write("evaluation", figures="9" * 5000)


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_line_of_another_process_stands_on_no_bar(stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for tell in (lambda: tell_user("rank 1 was killed"), lambda: Console(1, 2).warn("a small thing")):
        monkeypatch.setattr("sys.stderr", stream())
        sys.stderr.write("  8%|███  | 183/2200")
        tell()
        after = sys.stderr.getvalue().partition("183/2200")[2]  # type: ignore[attr-defined]
        assert after.startswith("\r\x1b[K") == (stream is Terminal)
        assert after.endswith("rank 1 was killed\n") or after.endswith("[rank 1] warning: a small thing\n")
