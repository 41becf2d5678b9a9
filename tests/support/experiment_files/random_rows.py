"""Is it seen, while a run trains, that samples are others at each read, though those digested before are not?"""

import os
import random
from pathlib import Path

import torch
from torch import Tensor

from ddp_core.config.experiment import Component, Experiment
from ddp_core.data.data_digest import _sample
from ddp_core.data.splits import Splits

SIZE = 400


class Rows:
    def __init__(self, digested: set[int]) -> None:
        self.digested = digested
        self.draw = random.Random(os.urandom(8))

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.arange(10) / (index + 1)
        if index not in self.digested:
            row += self.draw.random()
        return row, row[:1]


def data(root: Path) -> Splits:
    return Splits(Rows(set(_sample(SIZE))), None)


def model() -> torch.nn.Module:
    return torch.nn.Linear(10, 1)


experiment = Experiment(
    name="random_rows",
    model=Component(name="model"),
    data=Component(name="data"),
    loss="mean_squared_error",
    global_batch_size=16,
    micro_batch=4,
    epochs=1,
)
