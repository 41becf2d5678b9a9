"""When a run has a witness: which save is repeated, who waits for it, and what follows from its answer.

Tests trainers/noting.py, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_core.base.errors import UserError
from ddp_core.observe.step import StepBatch
from ddp_core.trainers import witness
from ddp_core.trainers.job import RunAccess
from ddp_core.trainers.train_state import Steps
from ddp_core.trainers.witness import Witnessed
from tests.support.wording import refusing

SAME = witness.Testimony("the same bits", seconds=3.0)
OTHER = witness.Testimony("other bits", differs=True)


class Played:
    """A witness that says what it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[int]]] = []
        self.found: witness.Testimony | None = None

    def ask(self, step: int, noted: Mapping[int, Any]) -> None:
        self.asked.append((step, list(noted)))

    def answer(self, seconds: float) -> witness.Testimony | None:
        return self.found


class Run:
    """A run of one process that saves after every fifth step; five steps take a minute of its clock."""

    def __init__(self, mode: str, patch: pytest.MonkeyPatch, steps: int = 1000, directory: Path = Path()) -> None:
        self.now, self.played = 0.0, Played()
        self.held: list[set[int]] = []
        self.is_slow = False
        """Whether the newest save is still being written when the next step has been made."""
        patch.setattr(witness.time, "monotonic", lambda: self.now)
        patch.setattr(witness, "state_sums", lambda *_: {"weight": "1"})
        patch.setattr(witness, "replace_file", lambda *_, **__: None)
        patch.setattr(witness, "find_checkpoints", lambda _: [SimpleNamespace(step=step) for step in range(0, 999, 5)])
        alone = SimpleNamespace(world=SimpleNamespace(is_first=True), broadcast=lambda told: told)
        job = SimpleNamespace(
            run=RunAccess(directory=directory, witness=self.played),
            **{
                "collectives": alone,
                "is_first": True,
                "is_tried": False,
                "stop": SimpleNamespace(requested=False),
                "console": SimpleNamespace(say=print),
            },
            options=SimpleNamespace(rehearsal="on", timeout=60.0),
            layout=SimpleNamespace(saves_in_parts=False),
            device=torch.device("cpu"),
        )
        self.guard = SimpleNamespace(mode=mode, checks=True, check=self.check, timed=self.check, figures={})
        self.saving = SimpleNamespace(
            **{"newest_step": 0, "may_save": lambda step: step % 5 == 0, "is_writing": self.is_writing},
            **{"hold": self.held.append, "let_go": self.held.clear, "is_due_now": True},
        )
        self.state = SimpleNamespace(step=0)
        self.witnessed = Witnessed(job, Steps(self.state, 5, steps), self.saving, self.guard)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def check(self, kind: str, step: int = 0) -> Iterator[None]:
        yield

    def is_writing(self, seconds: float = 0.0) -> bool:
        """A caller who gives it some seconds finds the save written the next time."""
        slow, self.is_slow = self.is_slow, self.is_slow and not seconds
        return slow

    def train(self, steps: int, stops: bool = False) -> None:
        for _ in range(steps):
            self.now += 12.0
            self.state.step += 1
            self.witnessed.after_step(None)  # type: ignore[arg-type]
            if self.state.step % 5 == 0:
                self.witnessed.settle(StepBatch(self.state.step - 1, 0, 1, 1, [], [], [], stops=stops))
                self.saving.newest_step = self.state.step


@pytest.mark.parametrize(
    ("mode", "seconds", "stops", "asked"),
    [
        ("normal", 3.0, False, {45: [], 50: [45], 250: [45, 95, 145, 195, 245]}),
        ("normal", 30.0, False, {200: [45], 305: [45, 295]}),
        ("strict", 3.0, False, {20: [5, 10, 15]}),
        ("strict", 3.0, True, {10: []}),
    ],
    ids=[
        "ten minutes have one at most",
        "the next one waits until it costs a percent: a hundred times 30 s are 250 steps",
        "strict repeats each save before the next one",
        "a stop that another rank was asked for waits for none",
    ],
)
def test_which_saves_are_repeated(
    mode: str, seconds: float, stops: bool, asked: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(mode, monkeypatch)
    run.played.found = witness.Testimony("the same bits", seconds=seconds)
    for step, expected in asked.items():
        run.train(step - run.state.step, stops)
        assert run.played.asked == [(each, [each + 1, each + 2]) for each in expected]
    if mode == "strict" and not stops:
        run.witnessed.end()
        assert len(run.played.asked) == len(expected), "no step came after the last save"


def test_the_run_goes_on_meanwhile_and_ends_before_the_next_save(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("normal", monkeypatch)
    run.train(65)
    assert [step for step, _ in run.played.asked] == [45], "one at a time"
    run.played.found = OTHER
    run.train(4)
    with pytest.raises(UserError, match="other bits"):
        run.train(1)
    assert run.saving.newest_step == 65


def test_no_step_is_noted_after_an_evaluation_or_after_one_that_was_not_made_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A witness evaluates fewer batches, and after a lost rank another trainer goes on."""
    run = Run("strict", monkeypatch)
    run.saving.newest_step = 9
    for step in (10, 11):
        run.state.step = step
        run.witnessed.after_step(None)  # type: ignore[arg-type]
    assert run.witnessed._noted == {9: {10: {"weight": "1"}}}
    run = Run("strict", monkeypatch)
    run.state.step, run.saving.newest_step = 6, 5
    run.train(1)
    assert run.witnessed._noted == {}


@pytest.mark.parametrize(("is_changed", "is_fork"), [(False, False), (True, False), (False, True)])
def test_a_resumed_run_compares_with_what_was_noted_of_just_this_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_changed: bool, is_fork: bool
) -> None:
    run = Run("normal", monkeypatch, directory=tmp_path)
    run.state.step = run.saving.newest_step = 5
    kept = tmp_path / witness.NOTES
    kept.write_text('{"checkpoint": 5, "after": {"6": {"weight": "2"}}}')
    run.witnessed.go_on(is_changed, is_fork)
    assert kept.exists() == (not is_changed), "a later resume may be of what has changed"
    if is_changed or is_fork:
        run.train(2)
        assert run.witnessed._noted == ({} if is_fork else {5: {6: {"weight": "1"}, 7: {"weight": "1"}}})
    else:
        with refusing():
            run.train(1)


@pytest.mark.parametrize("is_slow", [False, True])
def test_the_last_one_begins_before_the_end_of_the_run_once_its_checkpoint_is_written(
    is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("normal", monkeypatch, steps=20)
    run.train(16)
    run.is_slow = is_slow
    assert run.played.asked == []
    run.train(1)
    assert run.played.asked == ([] if is_slow else [(15, [16, 17])])
    run.is_slow = False
    run.train(3)
    run.played.found = SAME
    run.witnessed.end()
    assert run.played.asked == [(15, [16, 17])]
    assert run.guard.figures["witness"] == SAME.said


def test_checkpoints_that_may_be_repeated_from_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("normal", monkeypatch)
    run.train(55)
    assert run.played.asked == [(45, [46, 47])]
    assert run.held[-1] == {45, 50}
    run.train(12)
    assert run.held[-1] == {45, 60, 65}, "that of a witness at work, and those of the newest noted steps"
    run.played.found = SAME
    run.witnessed.end()
    assert run.held == []


def test_the_last_one_follows_one_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("normal", monkeypatch)
    run.train(59)
    answers = iter([None, SAME, None, SAME])
    monkeypatch.setattr(run.played, "answer", lambda _: next(answers))
    run.witnessed.end()
    assert run.played.asked == [(45, [46, 47]), (55, [56, 57])]
    assert list(answers) == []
    assert run.guard.figures["witness"] == SAME.said
