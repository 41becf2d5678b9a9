"""Which evaluation's checkpoint is kept as the best one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_core.config.experiment import Experiment
from ddp_core.trainers.train_state import TrainState
from tests.support.commands import command
from tests.support.layout_cases import EVERY_NAME
from tests.support.wording import refusing


def are_best(best: str | None, *figures: object) -> list[bool]:
    model = nn.Linear(1, 1)
    state, found = TrainState(model, torch.optim.SGD(model.parameters())), []
    for state.step, value in enumerate(figures):
        state.take_evaluation({"test_loss": 1.0, "test_f1": value}, best)
        found.append(state.is_best)
    return found


def test_more_or_less_of_any_figure_is_better() -> None:
    assert are_best("max f1", 0.5, 0.5, 0.6) == are_best("max test_f1", 0.5, 0.5, 0.6) == [True, False, True]
    assert are_best("min f1", 0.5, 0.4, 0.6) == [True, True, False]
    assert are_best("max f1", None, math.nan, 0.1) == [False, False, True]
    assert are_best(None, 0.1, 0.2) == [True, False]


def test_a_figure_that_the_evaluation_does_not_have_is_named_with_the_nearest() -> None:
    with refusing():
        are_best("max f2", 0.5)
    with refusing():
        are_best("max f1", [0.5, 0.5])


def test_nobody_guesses_whether_more_is_better() -> None:
    for best in ("f1", "most f1", "max"):
        with refusing():
            Experiment.from_json({"name": "any", "global_batch_size": 1, "best": best})


@pytest.mark.full
def test_a_run_keeps_the_checkpoint_of_that_evaluation_and_refuses_a_wrong_name_before_training(tmp_path: Path) -> None:
    words = ("train", EVERY_NAME, "--device", "cpu", "--output", str(tmp_path))
    wrong = command(*words, "--set", "best=max class_mean_f2")
    assert wrong.code == 2
    assert "no number class_mean_f2; did you mean test_class_mean_f1" in wrong.errors
    assert list(tmp_path.iterdir()) == [], "a refused run leaves no directory"
    ended = command(*words, "--set", "best=min ema_test_perplexity")
    assert ended.code == 0, ended.errors
    (pointer,) = tmp_path.glob("*/*/checkpoints/best.json")
    assert "step-000000008" in pointer.read_text()
