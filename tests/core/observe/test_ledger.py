"""The ledger read back: which lines count after several attempts, and the messages for missing or repeated samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddp_core.base.errors import UserError
from ddp_core.cli import main
from ddp_core.observe.ledger import Ledger, audit, committed_steps
from ddp_core.observe.step import StepBatch


def write(
    directory: Path, attempt: int, rank: int, first_step: int, steps: dict[int, tuple[int, list[int]]], done: int = 9
) -> None:
    """The ledger of one rank that began all `steps` and noted those up to `done` as done."""
    ledger = Ledger(directory, attempt, rank, first_step)
    for step, (epoch, ids) in steps.items():
        batch = StepBatch(step - 1, epoch, len(ids), [], [np.array(ids, dtype=np.int64)], [])
        ledger.before_step(batch)
        if step <= done:
            ledger.after_step(batch)
    ledger.close()


def test_a_later_attempt_takes_back_what_it_trains_again(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, 1, rank, 0, {1: (0, [rank]), 2: (0, [2 + rank]), 3: (0, [4 + rank])})
        write(tmp_path, 2, rank, 2, {3: (0, [5 - rank]), 4: (1, [rank])})
    assert committed_steps(tmp_path) == {1: (0, [0, 1]), 2: (0, [2, 3]), 3: (0, [5, 4]), 4: (1, [0, 1])}
    assert audit(tmp_path).startswith("ledger: 4 steps, 2 epochs, 8 samples")


def test_a_step_is_done_for_all_ranks_when_it_is_done_on_one(tmp_path: Path) -> None:
    """Rank 1 is killed after it sent its gradients of step 2, before it could note that the step is done."""
    write(tmp_path, 1, 0, 0, {1: (0, [0]), 2: (0, [2]), 3: (0, [4])}, done=2)
    write(tmp_path, 1, 1, 0, {1: (0, [1]), 2: (0, [3])}, done=1)
    assert committed_steps(tmp_path) == {1: (0, [0, 1]), 2: (0, [2, 3])}


def test_an_attempt_that_starts_after_a_step_shows_that_the_step_was_done(tmp_path: Path) -> None:
    """In a live recovery the others go on after a step that no rank could note before one was lost."""
    for rank in (0, 1):
        write(tmp_path, 1, rank, 0, {1: (0, [rank]), 2: (0, [2 + rank])}, done=1)
    write(tmp_path, 2, 0, 2, {3: (0, [4, 5])})
    assert committed_steps(tmp_path) == {1: (0, [0, 1]), 2: (0, [2, 3]), 3: (0, [4, 5])}


def test_an_attempt_that_died_before_its_first_line_takes_nothing_back(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, 0, {1: (0, [0]), 2: (0, [1])})
    (tmp_path / "ledger" / "attempt-0002-rank-0000.jsonl").touch()
    assert sorted(committed_steps(tmp_path)) == [1, 2]


@pytest.mark.parametrize("lines", ["", '{"from_step": 0}\n', '{"from_step": 0}\n{"step": 1, "epo'])
def test_a_run_without_a_step_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "attempt-0001-rank-0000.jsonl").write_text(lines)
    assert main(["ledger", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert f"{tmp_path}: no rank has finished a step" in said.err


def test_a_run_without_a_ledger_is_told_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="train with --ledger"):
        audit(tmp_path)


def test_a_sample_trained_twice_and_a_missing_step_are_named(tmp_path: Path) -> None:
    (tmp_path / "twice").mkdir()
    write(tmp_path / "twice", 1, 0, 0, {1: (0, [7]), 2: (0, [8, 7])})
    with pytest.raises(UserError, match="sample 7"):
        audit(tmp_path / "twice")
    (tmp_path / "gap").mkdir()
    write(tmp_path / "gap", 1, 0, 0, {1: (0, [7]), 3: (0, [8])})
    with pytest.raises(UserError, match="no rank trained step 2"):
        audit(tmp_path / "gap")


@pytest.mark.parametrize("line", ['{"step": 3}', '{"done": "3"}', '{"step": 3, "ids": {}}', "[" * 100_000, "\x00", "7"])
def test_a_line_that_is_none_ends_a_ledger(tmp_path: Path, line: str) -> None:
    write(tmp_path, 1, 0, 0, {1: (0, [0]), 2: (0, [1])})
    path = tmp_path / "ledger" / "attempt-0001-rank-0000.jsonl"
    path.write_text(path.read_text() + line + "\n")
    assert sorted(committed_steps(tmp_path)) == [1, 2]


def test_a_step_far_away_is_a_gap_and_no_wait(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, 0, {1: (0, [0]), 2**62: (0, [1])}, done=2**62)
    with pytest.raises(UserError, match="no rank trained step 2"):
        audit(tmp_path)
