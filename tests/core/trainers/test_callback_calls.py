"""Callbacks: which moments they are called at, with what, on which ranks, and whose fault it is when they raise.

Tests observe/callback.py, trainers/assemble.py and
trainers/figures.py, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.distributed.stop import Stopped, StopRequest
from ddp_core.experiment import blame
from ddp_core.observe.callback import Callback, EarlyStopping, Moment
from tests.core.trainers.builders import experiment, samples, trainer_of
from tests.support.wording import refusing


class Notes(Callback):
    """Notes what it is told, and does something `then`."""

    def __init__(self, then: Callable[[str, Moment], None] = lambda *_: None) -> None:
        self.moments: list[tuple[str, Moment]] = []
        self.then = then

    def on_step(self, moment: Moment) -> None:
        self.note("step", moment)

    def on_epoch(self, moment: Moment) -> None:
        self.note("epoch", moment)

    def on_end(self, moment: Moment) -> None:
        self.note("end", moment)

    def note(self, kind: str, moment: Moment) -> None:
        self.moments.append((kind, moment))
        self.then(kind, moment)


def test_callbacks_are_told_of_every_step_epoch_and_the_end() -> None:
    notes = Notes()
    record = experiment(epochs=2, ema_decay=0.5, schedule={"name": "cosine"})
    with trainer_of(record, test=samples(20, 1), callbacks=[notes]) as trainer:
        trainer.train()
    kinds = [kind for kind, _ in notes.moments]
    assert kinds == [*["step"] * 4, "epoch", *["step"] * 4, "epoch", "end"]
    told = [moment for _, moment in notes.moments]
    assert [moment.step for moment in told] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 8]
    assert [moment.epoch for moment in told] == [*[0] * 5, *[1] * 6]
    assert told[0].evaluation == {}
    assert told[4].evaluation.keys() == {"test_loss", "test_accuracy", "ema_test_loss", "ema_test_accuracy"}
    losses = [moment.loss for moment in told if moment.loss is not None]
    assert len(losses) == len(told)
    assert losses[4] == pytest.approx(sum(losses[:4]) / 4)
    assert [moment.learning_rate for moment in told[:2]] == [0.1, pytest.approx(0.1 * 0.9619, rel=1e-3)]
    assert told[0].model is trainer.state.model
    assert isinstance(told[0].averaged_model, nn.Module)
    assert (told[0].rank, told[0].is_first, told[0].directory) == (0, True, Path("run"))


def test_a_run_that_is_stopped_has_no_end() -> None:
    with StopRequest() as stop:
        notes = Notes(lambda _, moment: setattr(stop, "reason", "a test" if moment.step == 2 else None))
        with trainer_of(experiment(), callbacks=[notes], stop=stop) as trainer, pytest.raises(Stopped):
            trainer.train()
    assert {kind for kind, _ in notes.moments} == {"step"}


@pytest.mark.parametrize("moment", ["step", "epoch", "end"])
def test_what_a_callback_raises_is_the_experiments(moment: str) -> None:
    def fail(kind: str, _: Moment) -> None:
        if kind == moment:
            raise KeyError("no such figure")

    with trainer_of(experiment(), callbacks=[Notes(fail)]) as trainer, pytest.raises(KeyError) as failure:
        trainer.train()
    exit_code, line = blame.unforeseen(failure.value)
    assert exit_code == ExitCode.BAD_INPUT
    assert "KeyError: 'no such figure'" in line


def test_stop_iteration_is_answered_with_what_to_write() -> None:
    said = rf"^{re.escape(__file__)}:\d+: callback Notes raised StopIteration: .* call moment\.stop\(\"the reason\"\)"
    notes = Notes(lambda *_: next(iter(())))
    with trainer_of(experiment(), callbacks=[notes]) as trainer, pytest.raises(UserError, match=said):
        trainer.train()


def stops_at(kind: str, step: int) -> Notes:
    """Asks to end the run at a moment of a step."""

    def ask(told: str, moment: Moment) -> None:
        if (told, moment.step) == (kind, step):
            moment.stop("first")
            moment.stop("second")

    return Notes(ask)


@pytest.mark.parametrize(
    ("kind", "step", "last"), [("step", 2, ("epoch", 2, True)), ("epoch", 4, ("epoch", 4, False)), ("step", 8, None)]
)
def test_a_callback_ends_the_run(kind: str, step: int, last: tuple[str, int, bool] | None) -> None:
    stops = stops_at(kind, step)
    record = experiment(epochs=2, evaluation={"every_epochs": 2})
    with trainer_of(record, test=samples(20, 1), callbacks=[stops]) as trainer:
        trainer.train()
        state = trainer.state
        assert trainer.steps.are_done
    assert (state.step, state.position.ended_early) == (step, None if step == 8 else "first")
    calls = [(told, moment.step, moment.is_evaluated) for told, moment in stops.moments]
    assert calls[-1] == ("end", step, False)
    assert last in (calls[-2], None)
    assert state.position.evaluation.keys() == {"test_loss", "test_accuracy"}, "the last weights are evaluated, too"
    assert state.position.epoch_samples == 0


def test_a_run_cut_short_has_a_mean_of_all_losses_and_trains_no_more_from_its_checkpoint() -> None:
    means = []
    for every in (1, 10):
        with trainer_of(experiment(), callbacks=[stops_at("step", 3)]) as trainer:
            trainer.strategy.losses._read_every = every  # as on CUDA
            trainer.train()
            means.append(trainer.state.position.last_epoch_loss)
            kept = trainer.state.state_dict()
    assert means[0] == means[1]
    with trainer_of(experiment(), callbacks=[stops_at("step", 4)]) as trainer:
        trainer.state.load_state_dict(kept)
        trainer.train()
        assert (trainer.state.step, trainer.state.position.ended_early) == (3, "first")


def told(value: object, step: int, **fields: Any) -> tuple[Moment, list[str]]:
    asked: list[str] = []
    given = {"step": step, "evaluation": {"test_loss": value}, "is_evaluated": True, "_stop": asked.append}
    given |= dict.fromkeys(("loss", "averaged_model", "directory")) | {"epoch": 0, "learning_rate": 0.1, "rank": 0}
    return Moment(model=nn.Identity(), **given | fields), asked


@pytest.mark.parametrize(
    ("stopping", "values", "stops_at"),
    [
        (EarlyStopping("test_loss", patience=2), [3.0, 2.0, 2.0, 2.5, 1.0], 4),
        (EarlyStopping("test_loss", patience=2, minimum=0.5), [3.0, 2.6, 2.4, 2.0, 1.9], 5),
        (EarlyStopping("test_loss", patience=1, mode="max"), [3.0, 4.0, 3.9], 3),
        (EarlyStopping("test_loss", patience=2), [math.nan, None, 1.0], 2),
        (EarlyStopping("test_loss", patience=2), [3.0, 4.0, 2.0, 4.0], None),
    ],
)
def test_early_stopping_counts_evaluations_without_progress(
    stopping: EarlyStopping, values: list[float | None], stops_at: int | None
) -> None:
    stopped = None
    for step, value in enumerate(values, 1):
        resumed = EarlyStopping("test_loss", patience=stopping.patience, minimum=stopping.minimum, mode=stopping.mode)
        resumed.load_state_dict(stopping.state_dict())
        stopping = resumed
        old, _ = told(value, step, is_evaluated=False)
        stopping.on_epoch(old)
        moment, asked = told(value, step)
        stopping.on_epoch(moment)
        if asked and stopped is None:
            stopped = step
    assert stopped == stops_at


def test_early_stopping_refuses_what_cannot_be_meant() -> None:
    wrong: list[dict[str, Any]] = [{"metric": "test_f1"}, {"patience": 0}, {"patience": 1.5}, {"minimum": -1.0}]
    for options in (*wrong, {"mode": "less"}):
        with refusing():
            EarlyStopping(**options)


def test_early_stopping_names_the_figures_that_there_are() -> None:
    moment, _ = told(1.0, 1)
    for stopping, at in (
        (EarlyStopping("test_los", mode="min"), moment),
        (EarlyStopping("test_loss"), replace(moment, evaluation={})),
    ):
        with refusing():
            stopping.on_epoch(at)
