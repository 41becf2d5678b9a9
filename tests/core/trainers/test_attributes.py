"""What optimizer, schedule, layers and callbacks keep in plain attributes: seen where it changes, and left as it is."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddp_core.observe.callback import Callback
from ddp_core.trainers.attributes import Attributes
from ddp_core.trainers.train_state import TrainState


class Keeps(torch.optim.SGD):
    """Keeps what its attributes say, and carries over what `carried` names."""

    def __init__(self, model: nn.Module, carried: tuple[str, ...] = (), **kept: Any) -> None:
        super().__init__(model.parameters(), lr=0.1, momentum=0.9)
        self.carried = carried
        vars(self).update(kept)

    def state_dict(self) -> Any:
        return super().state_dict() | {name: getattr(self, name) for name in self.carried}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({name: value for name, value in state_dict.items() if name not in self.carried})
        for name in self.carried:
            kept = getattr(self, name)
            if isinstance(kept, list):
                kept += state_dict[name]  # on the live object this would double the list
            else:
                setattr(self, name, state_dict[name])


def state_of(make: Any = None, model: nn.Module | None = None) -> TrainState:
    model = nn.Linear(2, 2) if model is None else model
    state = TrainState(model, torch.optim.SGD(model.parameters()) if make is None else make(model))
    update(state)
    return state


def update(state: TrainState) -> None:
    state.model(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()


def drawn(generator: Any) -> Any:
    generator.random()
    return generator


CHANGES: dict[str, tuple[Any, Any]] = {
    "a number": (1, lambda _: 2),
    "a tensor": (torch.zeros(3), lambda kept: kept + 1),
    "a tensor in place": (torch.zeros(3), lambda kept: kept.add_(1)),
    "a list in place": ([1], lambda kept: [*kept, 2]),
    "a number of numpy's": (np.float64(1), lambda kept: kept + 1),
    "an array": (np.zeros(3), lambda kept: np.add(kept, 1, out=kept)),
    "a deque": (deque([1.0]), lambda kept: (kept.append(2.0), kept)[1]),
    "a dictionary of tensors": ({"a": torch.zeros(2)}, lambda kept: {"a": kept["a"] + 1}),
    "nothing at first": (None, lambda _: "something"),
    "Python's generator": (random.Random(1), drawn),
    "numpy's generator": (np.random.default_rng(1), drawn),
    "numpy's old generator": (np.random.RandomState(1), lambda kept: (kept.rand(), kept)[1]),
    "torch's generator": (torch.Generator(), lambda kept: (torch.rand(1, generator=kept), kept)[1]),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_an_attribute_that_changes_and_is_not_carried_over_is_lost(kind: str) -> None:
    value, change = CHANGES[kind]
    state = state_of(lambda model: Keeps(model, kept=value, other=3))
    attributes = Attributes(state, ())
    assert attributes.lost() == {}
    vars(state.optimizer)["kept"] = change(value)
    assert list(attributes.lost()) == ["the optimizer's attribute kept"]


@pytest.mark.parametrize("kept", [7, [1, 2], 0.5])
def test_what_a_state_dict_carries_over_is_not_lost_and_the_live_optimizer_stays_as_it_is(kept: Any) -> None:
    empty: Any = [] if isinstance(kept, list) else 0
    state = state_of(lambda model: Keeps(model, ("kept",), kept=empty))
    attributes = Attributes(state, ())
    before = {number: dict(entries) for number, entries in state.optimizer.state.items()}
    vars(state.optimizer)["kept"] = kept
    assert list(attributes.changed()) == ["the optimizer's attribute kept"]
    assert attributes.lost() == {}
    assert vars(state.optimizer)["kept"] == ([1, 2] if isinstance(kept, list) else kept)
    assert before
    for parameter, entries in before.items():
        assert state.optimizer.state[parameter]["momentum_buffer"] is entries["momentum_buffer"]


def test_a_state_dict_that_cannot_be_tried_leaves_the_suspicion() -> None:
    state = state_of(lambda model: Keeps(model, ("gone",), kept=1, gone=1))
    attributes = Attributes(state, ())
    vars(state.optimizer)["kept"] = 2
    del vars(state.optimizer)["gone"]
    assert list(attributes.lost()) == ["the optimizer's attribute kept"]


@pytest.mark.parametrize("schedule", ["CosineAnnealingLR", "OneCycleLR", "ExponentialLR", "SequentialLR"])
def test_torchs_own_optimizers_and_schedules_are_trusted(schedule: str) -> None:
    state = state_of(lambda model: torch.optim.AdamW(model.parameters()))
    schedules = torch.optim.lr_scheduler
    if schedule == "SequentialLR":
        parts = [schedules.ConstantLR(state.optimizer), schedules.ExponentialLR(state.optimizer, 0.9)]
        state.schedule = schedules.SequentialLR(state.optimizer, parts, [1])
    else:
        words = {"CosineAnnealingLR": (5,), "OneCycleLR": (0.1, 10), "ExponentialLR": (0.9,)}[schedule]
        state.schedule = getattr(schedules, schedule)(state.optimizer, *words)
    assert state.schedule is not None
    attributes = Attributes(state, ())
    for _ in range(3):
        update(state)
        state.schedule.step()
    assert attributes.changed() == {}


class Layer(nn.Linear):
    count, cache = 0, None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.cache = super().forward(inputs)  # with its history, so that the next forward makes it anew
        return self.cache


class Told(Layer):
    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


@pytest.mark.parametrize(("layer", "lost"), [(Layer, ["the model's attribute 1.count"]), (Told, []), (nn.Linear, [])])
def test_attributes_of_layers_are_seen_unless_their_extra_state_has_them(layer: type[nn.Linear], lost: list) -> None:
    state = state_of(model=nn.Sequential(nn.Identity(), layer(2, 2)))
    attributes = Attributes(state, ())
    update(state)
    assert list(attributes.lost()) == lost


def test_a_callback_with_a_state_dict_is_not_named() -> None:
    class Counts(Callback):
        count = 0

    class Tells(Counts):
        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

    callbacks = [Counts(), Tells(), Counts()]
    attributes = Attributes(state_of(), callbacks)
    for callback in callbacks[:2]:
        callback.count += 1
    assert [(callback, name) for callback, name in attributes.kept_by_callbacks()] == [(callbacks[0], "count")]
