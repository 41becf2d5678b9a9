"""Does the guard see it? CASE names what a model or its data do that nobody foresaw, or that is harmless."""

import os
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ddp_core import Callback, Component, Experiment, Splits
from ddp_core.data.builders import toy_data
from ddp_core.data.data_digest import _sample
from ddp_core.observe.callback import Moment

CASE = os.environ.get("CASE", "")
OWN = torch.Generator().manual_seed(3)
KEPT: dict[str, Any] = {"calls": 0}


class Net(nn.Module):
    """A small network with one habit."""

    temperature = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.calls = 0
        self.table: Tensor | None = None
        # Not registered: copies of the model still lead to the weights of the first one.
        self.closure = lambda: self.first.weight
        if CASE == "buffer":
            self.register_buffer("seen", torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            inputs = self.changed(inputs)
        return self.last(torch.tanh(self.norm(self.first(inputs)) * self.temperature))

    def changed(self, inputs: Tensor) -> Tensor:
        """The inputs, with what CASE does to them."""
        self.calls += 1
        KEPT["calls"] += 1
        if CASE == "attribute":
            return inputs * (1 + 0.01 * self.calls)
        if CASE == "global":
            return inputs * (1 + 0.01 * KEPT["calls"])
        if CASE == "own generator":
            return inputs + 0.01 * torch.randn(inputs.shape, generator=OWN)
        if CASE == "true randomness":
            return inputs + int.from_bytes(os.urandom(2), "little") / 2**16
        if CASE == "clock":
            return inputs + time.perf_counter() % 1
        if CASE == "rank":
            return inputs * (1 + 0.1 * int(os.environ.get("RANK", 0)))
        if CASE == "closure":
            return inputs * (1 + self.closure()[0])  # not a sum, which the norm takes away
        if CASE == "buffer":
            self.seen.data += 0.01  # which torch does not count as a write
            return inputs * self.seen
        if CASE == "late" and self.calls > 8:
            return inputs + 0.01 * self.calls
        if CASE == "cached table":
            if self.table is None:
                self.table = torch.linspace(0.9, 1.1, inputs.shape[1])
            return inputs * self.table
        if CASE == "asks whether it is cut" and type(self) is not Net:  # fully_shard gives it another class
            return inputs + inputs.square()
        if CASE == "changes its inputs":
            return inputs.mul_(0.5)
        if CASE == "clamps its weights":
            with torch.no_grad():
                self.first.weight.clamp_(-0.2, 0.2)
        return inputs


class Anneals(Callback):
    """Changes an attribute of the model, on every rank alike."""

    ranks = "all"

    def on_step(self, moment: Moment) -> None:
        moment.model.temperature = 1 / moment.step  # type: ignore[assignment]


class Noisy:
    """A data set whose rows are others at each read, but for some."""

    def __init__(self, data: Any, kept: Collection[int] = ()) -> None:
        self.data, self.kept = data, kept

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.data[index]
        noise = 0 if index in self.kept else int.from_bytes(os.urandom(2), "little") / 2**16
        return inputs + noise, targets


def data() -> Splits:
    if CASE == "noisy but where it is digested":
        splits = toy_data(size=400)
        return replace(splits, train=Noisy(splits.train, _sample(400)), digest="")
    splits = toy_data(size=64)
    # The builder gives a digest, so `ddp train` does not look at the items before it begins.
    return replace(splits, train=Noisy(splits.train)) if CASE == "noisy data" else splits


def model() -> nn.Module:
    return Net()


callbacks = [Anneals()] if CASE == "callback" else []
experiment = Experiment(
    name="foreign_code",
    model=Component(name="model"),
    data=Component(name="data"),
    loss="mean_squared_error",
    global_batch_size=16,
    micro_batch=4,
    epochs=3,
)
