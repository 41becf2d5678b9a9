"""Do metrics, and a forward in evaluation, that draw random numbers give the same figures everywhere?"""

import random

import draws
import numpy as np
import torch
from draws import SETTINGS, layers
from torch import Tensor, nn

from ddp_core import Experiment
from ddp_core.data.splits import InMemory


class AlwaysDropping(nn.Sequential):
    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(rows, 0.5, training=True))


def data() -> tuple[InMemory, ...]:
    """Samples that are fetched without code of this file, so that nothing is keyed for that."""
    return tuple(InMemory(*map(torch.stack, zip(*rows, strict=True))) for rows in draws.data())


def model() -> nn.Module:
    return AlwaysDropping(*layers())


def metrics(outputs: Tensor, targets: Tensor) -> dict[str, tuple[float, int]]:
    return {"drawn": (float(torch.rand(())) + random.random() + np.random.rand(), 1)}


experiment = Experiment(name="draws_metrics", **SETTINGS)
