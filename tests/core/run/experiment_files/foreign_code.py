"""Does the guard see it? CASE names what a model or its data do that nobody foresaw."""

import os
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ddp_core import Experiment, Splits
from ddp_core.data.builders import toy_data
from ddp_core.data.data_digest import _sample

CASE = os.environ.get("CASE", "")


class Net(nn.Module):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(inputs))))


class Noisy:
    """A data set whose rows are others at each read, but for some."""

    def __init__(self, data: Any, kept: Collection[int]) -> None:
        self.data, self.kept = data, kept

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.data[index]
        noise = 0 if index in self.kept else int.from_bytes(os.urandom(2), "little") / 2**16
        return inputs + noise, targets


def data() -> Splits:
    if CASE != "noisy but where it is digested":
        return toy_data(size=64)
    splits = toy_data(size=400)
    return replace(splits, train=Noisy(splits.train, _sample(400)), digest="")


def model() -> nn.Module:
    return Net()


experiment = Experiment(name="foreign_code", loss="mean_squared_error", global_batch_size=16, micro_batch=4, epochs=3)
