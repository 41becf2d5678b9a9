"""A loss that averages is found before the first step, and the check leaves no trace.

Tests trainers/job.py, too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.observe.callback import Callback, Moment
from ddp_core.trainers import Trainer
from ddp_core.trainers.trial import check_loss
from tests.core.trainers.builders import CLASSES, FEATURES, experiment, finished, samples, trainer_of


class Noisy(nn.Module):
    """A model that adds random numbers to a buffer, and has batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES), nn.Dropout(0.5))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls = self.calls + torch.rand(()) + np.random.random() + random.random()
        return self.layers(inputs)  # type: ignore[no-any-return]


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="sum")


def with_loss(trainer: Trainer, loss: Callable[..., Any]) -> Trainer:
    job = trainer.job
    return replace(trainer, job=replace(job, parts=replace(job.parts, loss=loss)))


def checked(loss: Callable[..., Any], capsys: pytest.CaptureFixture[str], **fields: Any) -> str:
    """What the check says about a loss, by an error or by a warning."""
    errors: list[UserError] = []
    with trainer_of(experiment(loss="mine", **fields), Noisy) as trainer:
        trainer = with_loss(trainer, loss)
        trainer.strategy.passes._loss = loss
        before = traces(trainer.state.model)
        try:
            check_loss(trainer)
        except UserError as error:
            errors.append(error)
        assert traces(trainer.state.model) == before
        assert all(module.training for module in trainer.state.model.modules())
    assert [error.exit_code for error in errors] == [ExitCode.BAD_INPUT] * len(errors)
    return "".join(map(str, errors)) + capsys.readouterr().out


def traces(model: nn.Module) -> tuple[Any, ...]:
    """Weights, buffers and the states of all random numbers."""
    states = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
    return weights_digest(model.state_dict()), *states


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "loss",
    [functional.cross_entropy, lambda outputs, targets: 1e-6 * functional.cross_entropy(outputs, targets)],
    ids=["mean", "small mean"],
)
def test_a_loss_that_averages_is_an_error(
    loss: Callable[..., Any], precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = checked(loss, capsys, precision=precision)
    assert "loss mine gives" in said
    assert "a micro-batch of 4 samples would count as one sample" in said
    assert "reduction='sum'" in said


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_sum_passes(precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(summed, capsys, precision=precision) == ""
    assert checked(lambda outputs, targets: -summed(outputs, targets), capsys, precision=precision) == ""


def test_a_part_that_does_not_count_per_sample_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    said = checked(lambda outputs, targets: summed(outputs, targets) + 1.0, capsys)
    assert said.startswith("warning: loss mine gives ")
    assert "depends on micro_batch" in said
    assert said.count("\n") == 1
    said = checked(lambda outputs, targets: outputs, capsys)
    assert said.startswith(f"loss mine returned a tensor of shape [2, {CLASSES}]; let it return one number")


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_there_is_no_verdict_on_what_says_nothing(value: float, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(lambda outputs, targets: outputs.sum() * 0 + value, capsys) == ""
    assert checked(lambda outputs, targets: targets.no_such_name, capsys) == "", "an error that training will meet"


def test_a_run_that_is_only_tried_makes_the_first_steps_of_the_whole_one() -> None:
    record = experiment(epochs=3, schedule={"name": "cosine"}, evaluation={"samples_per_batch": 1})
    tried = finished(record, test=samples(5, 1), only_steps=2)
    whole: list[str] = []

    class AtStepTwo(Callback):
        def on_step(self, moment: Moment) -> None:
            if moment.step == 2:
                whole.append(weights_digest(moment.model.state_dict()))

    finished(record, callbacks=[AtStepTwo()])
    assert [weights_digest(tried.state.model.state_dict())] == whole
    first = samples(5, 1).__getitems__([0, 1])
    assert tried.state.position.evaluation["test_loss"] == pytest.approx(
        functional.cross_entropy(tried.state.model(first[0]), first[1]).item()
    )
