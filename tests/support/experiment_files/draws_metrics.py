"""Do metrics, and a forward in evaluation, that draw random numbers give the same figures everywhere?"""

import random

import numpy as np
import torch
from draws_rows import SETTINGS, data, layers
from torch import Tensor, nn

from ddp_core import Component, Experiment


class AlwaysDropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(nn.functional.dropout(rows, 0.5, training=True))


def model() -> nn.Module:
    return AlwaysDropping()


def metrics(outputs: Tensor, targets: Tensor) -> dict[str, tuple[float, int]]:
    return {"drawn": (float(torch.rand(())) + random.random() + np.random.rand(), 1)}


experiment = Experiment(name="draws_metrics", model=Component(name="model"), data=Component(name="data"), **SETTINGS)
__all__ = ["data"]
