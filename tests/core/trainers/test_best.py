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


@pytest.mark.parametrize("best", ["f1", "most f1", "max"])
def test_nobody_guesses_whether_more_is_better(best: str) -> None:
    with refusing():
        Experiment.from_json({"name": "any", "global_batch_size": 1, "best": best})


@pytest.mark.full
def test_a_run_keeps_the_checkpoint_of_that_evaluation(tmp_path: Path) -> None:
    words = ("--set", "epochs=2", "--set", "best=min accuracy", "--output", str(tmp_path))
    ended = command("train", "digits", *words)
    assert ended.code == 0, ended.errors
    (pointer,) = tmp_path.glob("*/*/checkpoints/best.json")
    assert "step-000000022" in pointer.read_text()


OWN_FIGURE = """
from ddp_core import Component, Experiment

def metrics(outputs, targets):
    return {"f1": (outputs.argmax(1) == targets).float().sum()}

experiment = Experiment(name="own", model=Component(name="small_cnn"), data=Component(name="digits"),
                        global_batch_size=64, micro_batch=32, epochs=1, ema_decay=0.9, best=BEST)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("metrics", "best", "said"),
    [
        ("metrics", "max f2", "no number f2; did you mean test_f1"),
        ("_other", "max f1", "no number f1; did you mean test_loss"),
        ("metrics", "max ema_test_f1", None),
    ],
)
def test_a_wrong_name_is_said_before_training(metrics: str, best: str, said: str | None, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN_FIGURE.replace("metrics(", f"{metrics}(").replace("BEST", repr(best)))
    ended = command("train", str(file), "--set", "max_steps=1", "--output", str(tmp_path / "out"))
    assert ended.code == (0 if said is None else 2), ended.errors
    assert (said or "") in ended.errors
    assert bool(list(tmp_path.rglob("run.json"))) == (said is None), "a refused run leaves no directory"
