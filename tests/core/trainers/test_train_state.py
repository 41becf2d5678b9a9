"""What a run goes on from: all of it comes back, and which evaluation is the best one.

Tests sharding/ownership.py, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_core.checkpoint import Checkpointer, find_checkpoints, load
from ddp_core.config.experiment import Experiment
from ddp_core.distributed.world import World
from ddp_core.live.collectives import LiveCollectives
from ddp_core.model.averaging import WeightAverage
from ddp_core.observe.callback import Callback
from ddp_core.trainers.train_state import Position, TrainState
from tests.core.live.test_collectives import a_member
from tests.core.trainers.builders import CPU, batch_norm_and_dropout, experiment, samples, trainer_of
from tests.distributed.exact_cases import described
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


@pytest.mark.slow
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


def _lived_in() -> TrainState:
    """A state of which every entry is another than in a fresh one."""
    state = _unlived_in()
    for _ in range(2):
        loss = state.model(samples(4).inputs).square().sum()
        state.scaler.scale(loss).backward()
        state.scaler.step(state.optimizer)
        state.scaler.update(3.0)
        state.schedule.step()
        state.average.update_parameters(state.model)
    for kept in state.optimizer.state.values():
        kept |= {"newest": deque([torch.rand(3), 2], maxlen=3), "by_decay": {0.9: [torch.rand(2), "a text"]}}
    state.callbacks[0].load_state_dict({"count": 7})
    for number, name in enumerate(POSITION, 1):
        setattr(state.position, name, {"loss": float(number)} if name == "evaluation" else number)
    return state


def _unlived_in() -> TrainState:
    torch.manual_seed(0)
    model = batch_norm_and_dropout()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    average = WeightAverage(model, 0.9)
    return TrainState(model, optimizer, torch.amp.GradScaler("cpu"), schedule, average, [Counts()])


class Counts(Callback):
    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


PARTS = ("model", "optimizer", "scaler", "schedule", "average")
NOT_SAVED = ("learning_rate", "ownership", "_newest_evaluation", "marked", "is_settled", "_kept_buffers")
POSITION = [each.name for each in dataclasses.fields(Position)]


def _entries(state: TrainState) -> dict[str, Any]:
    """Every field of the state by its name, in plain values or as a text."""
    parts = {part: described(getattr(state, part).state_dict()) for part in PARTS}
    callbacks = [each.state_dict() for each in state.callbacks]
    return {name: getattr(state.position, name) for name in POSITION} | parts | {"callbacks": callbacks}


def test_every_entry_of_the_state_comes_back(tmp_path: Path) -> None:
    """A new field of TrainState is one more entry here, unless NOT_SAVED names it."""
    fresh, lived = _unlived_in(), _lived_in()
    expected, before = _entries(lived), _entries(fresh)
    unchanged = [name for name, value in expected.items() if before[name] == value]
    assert unchanged == [], "nothing would be seen of their loss"
    names = {each.name for each in dataclasses.fields(TrainState)}
    assert names == {*PARTS, *NOT_SAVED, "callbacks", "position"}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(lived.state_dict(), step=lived.step, epoch=0)
    fresh.load_state_dict(load(find_checkpoints(tmp_path)[0]))
    assert _entries(fresh) == expected


@pytest.mark.parametrize("moment", ["receive", "make"])
def test_a_step_that_another_rank_ends_has_changed_no_batch_statistics(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses come after the gradients: a rank may be lost between them, when the statistics are in the model."""
    record = experiment(reduction="exact", epochs=2)
    live = LiveCollectives(World(), CPU, a_member())
    with trainer_of(record, batch_norm_and_dropout, collectives=live) as trainer:
        owner = trainer.strategy.losses if moment == "receive" else trainer.loop.update
        usual, before = getattr(owner, moment), dict[str, Tensor]()

        def lost(asked: Any) -> Any:
            if trainer.state.step == 3:
                raise ConnectionError("lost")
            return usual(asked)

        def note(_: Any) -> None:
            if trainer.state.step == 3:
                before.update({name: value.clone() for name, value in trainer.state.model.state_dict().items()})

        monkeypatch.setattr(trainer.loop.observers, "settle", note)
        monkeypatch.setattr(owner, moment, lost)
        with pytest.raises(ConnectionError):
            trainer.train()
    held = trainer.state.marked_state()
    assert held["position"]["step"] == 3
    assert all(torch.equal(value, before[name]) for name, value in held["model"].items())
