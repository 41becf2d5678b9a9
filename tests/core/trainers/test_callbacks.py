"""Callbacks: which moments they are called at, with what, on which ranks, and whose fault it is when they raise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ddp_core.base.errors import ExitCode
from ddp_core.distributed.stop import Stopped, StopRequest
from ddp_core.experiment import blame
from ddp_core.observe.callback import Callback, Moment
from tests.core.trainers.test_trainers import experiment, samples, trainer_of


class Notes(Callback):
    def __init__(self, stop_at: int | None = None, stop: StopRequest | None = None) -> None:
        self.moments: list[tuple[str, Moment]] = []
        self.stop_at, self.stop = stop_at, stop

    def on_step(self, moment: Moment) -> None:
        self.moments.append(("step", moment))
        if self.stop is not None and moment.step == self.stop_at:
            self.stop.reason = "a test"

    def on_epoch(self, moment: Moment) -> None:
        self.moments.append(("epoch", moment))

    def on_end(self, moment: Moment) -> None:
        self.moments.append(("end", moment))


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
    assert told[0].model is trainer.model
    assert isinstance(told[0].averaged_model, nn.Module)
    assert (told[0].rank, told[0].is_first, told[0].directory) == (0, True, Path("run"))


def test_a_run_that_is_stopped_has_no_end() -> None:
    with StopRequest() as stop:
        notes = Notes(stop_at=2, stop=stop)
        with trainer_of(experiment(), callbacks=[notes], stop=stop) as trainer, pytest.raises(Stopped):
            trainer.train()
    assert {kind for kind, _ in notes.moments} == {"step"}


class Breaks(Callback):
    def __init__(self, moment: str) -> None:
        setattr(self, moment, self._break)

    def _break(self, moment: Moment) -> Any:
        raise KeyError("no such figure")


@pytest.mark.parametrize("moment", ["on_step", "on_epoch", "on_end"])
def test_what_a_callback_raises_is_the_experiments(moment: str) -> None:
    with trainer_of(experiment(), callbacks=[Breaks(moment)]) as trainer, pytest.raises(KeyError) as failure:
        trainer.train()
    exit_code, line = blame.unforeseen(failure.value)
    assert exit_code == ExitCode.BAD_INPUT
    assert "KeyError: 'no such figure'" in line
