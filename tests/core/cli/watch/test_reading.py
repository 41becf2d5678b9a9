"""What `ddp watch` finds in a run directory: of growing, torn, resumed, silent, killed and ended runs."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from ddp_core.base.errors import UserError
from ddp_core.cli.watch.appended import _LONGEST_LINE, AppendedLines
from ddp_core.cli.watch.curve import _MOST_POINTS, Curve, bars
from ddp_core.cli.watch.run import _READ_WHOLE_BYTES, WatchedRun
from ddp_core.record.lock import RunLock
from tests.core.cli.watch.growing import TWO_RANKS, beat, begin, note, train


def test_a_line_is_read_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    lines = AppendedLines(file)
    assert list(lines.read()) == []
    file.write_bytes(b"one\ntw")
    assert list(lines.read()) == [b"one"]
    assert list(lines.read()) == []
    with file.open("ab") as more:
        more.write(b"o\n" + b"x" * (2 * _LONGEST_LINE) + b"\nthree\n")
    assert list(lines.read()) == [b"two", b"three"]
    file.write_bytes(b"new\n")
    assert list(lines.read()) == [b"new"]


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"first\nsecond\nthird\n")
    assert list(AppendedLines(tmp_path / "log", 8).read()) == [b"third"]


def test_what_is_no_file_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert list(AppendedLines(tmp_path / "pipe").read()) == []


def test_a_curve_of_any_length_stays_small_and_keeps_its_shape() -> None:
    curve = Curve()
    for step in range(1, 200_001):
        curve.add(step, float(step))
    assert len(curve._points) <= _MOST_POINTS
    means = curve.means(10)
    assert means == pytest.approx([20_000 * (part + 0.5) for part in range(10)], rel=0.05)
    curve.roll_back(100_000)
    assert curve.means(1)[0] == pytest.approx(50_000, rel=0.02)


def test_bars_show_high_and_low() -> None:
    assert bars([3.0, 2.0, 1.0]) == "█▅▁"
    assert bars([1.0, 1.0]) == "▁▁"
    assert bars([2.0, 1.0], is_ascii=True).isascii()
    assert bars([]) == ""


def test_a_growing_run_is_followed(tmp_path: Path) -> None:
    directory = begin(tmp_path / "run", ago=5)
    run = WatchedRun(directory)
    with RunLock(directory.path):
        run.look()
        assert (run.state, run.step, run.seconds_left) == ("starting", 0, None)
        train(directory, 1, 20)
        assert run.look() == ["running"]
        note(directory, "evaluation", step=20, epoch=1, test_loss=0.5, test_accuracy=0.75)
        note(directory, "checkpoint", step=20, seconds=0.1)
        directory.log.write_text("2026-01-01T00:00:00Z all is well\n2026-01-01T00:00:01Z warning: mind the gap\n")
        assert run.look() == ["warning: mind the gap"]
    assert (run.step, run.loss, run.samples_per_second) == (20, 0.05, 80.0)
    assert run.seconds_left == pytest.approx(80.0, rel=0.01)
    assert run.evaluation["test_accuracy"] == 0.75
    assert run.checkpoint is not None
    assert run.checkpoint[0] == 20


def test_a_torn_line_and_what_is_no_record_are_left_out(tmp_path: Path) -> None:
    directory = begin(tmp_path / "run")
    train(directory, 1, 5)
    with directory.metrics.open("a") as file:
        file.write('{"kind": "step", "step": 999, "lo')
    run = WatchedRun(directory)
    run.look()
    assert run.step == 5
    with directory.metrics.open("ab") as more:
        more.write(b"\n\xff\xfe\n[]\n{}\n")
    train(directory, 6, 7)
    run.look()
    assert run.step == 7


def test_a_resumed_run_forgets_what_was_rolled_back(tmp_path: Path) -> None:
    directory = begin(tmp_path / "run")
    train(directory, 1, 30)
    run = WatchedRun(directory)
    run.look()
    record = directory.read()
    directory.update(attempts=[*record["attempts"], record["attempts"][0]])
    note(directory, "resume", step=10)
    assert run.look() == ["attempt 2 on single-cpu", "resumed at step 10"]
    assert (run.step, run.seconds_left) == (10, None)
    train(directory, 11, 12)
    run.look()
    assert run.losses.means(100)[-1] == pytest.approx(1 / 12)
    assert len(run.losses.means(100)) == 12
    assert run.seconds_left == pytest.approx(88, rel=0.01)


def test_of_very_many_records_some_and_the_last_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = begin(tmp_path / "run", total_steps=50_000)
    train(directory, 1, 30_001)
    assert directory.metrics.stat().st_size > 2 * _READ_WHOLE_BYTES
    run, parsed = WatchedRun(directory), []
    take = run._take
    monkeypatch.setattr(run, "_take", lambda line: (parsed.append(line), take(line)))
    run.look()
    assert len(parsed) < 12_000
    assert run.step == 30_001
    assert run.losses.first == 1.0


def test_who_waits_for_whom(tmp_path: Path) -> None:
    directory = begin(tmp_path / "run", layout=TWO_RANKS)
    beat(directory, 0, step=30, mean=0.01)
    beat(directory, 1, step=31, mean=0.05, node_rank=1)
    run = WatchedRun(directory)
    run.look()
    assert run.step == 30
    assert [rank.waits_seconds for rank in run.ranks.seen] == [pytest.approx(0.04), 0.0]
    assert run.ranks.slowest is not None
    assert "rank 1 (node 1)" in run.ranks.slowest


def test_a_hung_run_names_its_stopped_rank(tmp_path: Path) -> None:
    directory = begin(tmp_path / "run", layout=TWO_RANKS)
    beat(directory, 0, step=30, age=40)
    beat(directory, 1, step=30, age=40)
    run = WatchedRun(directory)
    with RunLock(directory.path):
        assert run.look() == []
        assert run.standing() == "no step for 40 s"
        (directory.path / "ledger").mkdir()
        for rank, last in ((0, '{"step": 31, "epoch": 3, "ids": [1, 2]}'), (1, '{"done": 30}')):
            (directory.path / "ledger" / f"attempt-0000-rank-{rank:04d}.jsonl").write_text(f'{{"done": 30}}\n{last}\n')
        assert run.standing() == "no step for 40 s: rank 1 has not begun the step that the others are in"
        beat(directory, 1, step=31)
        assert run.look() == ["running"]


def test_a_killed_run_is_interrupted_at_once_where_nothing_starts_it_again(tmp_path: Path) -> None:
    ended = multiprocessing.get_context("fork").Process(target=int)
    ended.start()
    ended.join()
    alone, of_ranks = begin(tmp_path / "alone"), begin(tmp_path / "ranks", layout=TWO_RANKS)
    for directory in (alone, of_ranks):
        beat(directory, 0, step=30, pid=ended.pid)
    assert WatchedRun(alone).state == "interrupted"
    run = WatchedRun(of_ranks)
    run.look()
    assert (run.state, run.is_over) == ("silent", False)
    assert "rank 0 is gone" in run.standing()
    beat(of_ranks, 0, step=30, age=100, pid=ended.pid)
    of_ranks.update(attempts=[of_ranks.read()["attempts"][0] | {"started_at": "2026-01-01T00:00:00Z"}])
    assert WatchedRun(of_ranks).state == "interrupted"


def test_clocks_of_other_machines_may_be_wrong(tmp_path: Path) -> None:
    directory = begin(tmp_path / "run", layout=TWO_RANKS)
    other = {"host": "elsewhere", "boot": "another"}
    beat(directory, 0, step=30, age=0, **other)
    beat(directory, 1, step=30, age=0, **other | {"time": time.time() - 3600})
    run = WatchedRun(directory)
    run.look()
    assert run.ranks.seen[1].age > 3000
    beat(directory, 1, step=31, **other | {"time": time.time() - 3599})
    run.look()
    assert run.ranks.seen[1].age < 1


def test_a_run_without_steps_in_its_record_has_no_end_in_sight(tmp_path: Path) -> None:
    directory = begin(tmp_path / "run")
    record = dict(directory.read())
    del record["total_steps"], record["steps_per_epoch"]
    directory.write(record)
    train(directory, 1, 20)
    run = WatchedRun(directory)
    run.look()
    assert (run.total_steps, run.seconds_left, run.step) == (None, None, 20)


def test_a_removed_run_is_said(tmp_path: Path) -> None:
    directory = begin(tmp_path / "run")
    run = WatchedRun(directory)
    (directory.path / "run.json").unlink()
    with pytest.raises(UserError, match="not a run directory"):
        run.look()
