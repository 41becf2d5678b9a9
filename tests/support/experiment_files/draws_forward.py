"""Does forward draw the same from Python's generator, numpy's and torch's wherever a micro-batch is computed?"""

import random

import numpy as np
import torch
from draws_rows import SETTINGS, data, layers
from torch import nn

from ddp_core import Component, Experiment


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.head = nn.Linear(3, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        noise = torch.from_numpy(np.random.standard_normal(6)).float()
        hidden = self.layers(rows * random.uniform(0.5, 1.5) + noise + 0.1 * torch.randn(6))
        depth = 0.0 if random.random() < 0.3 else np.random.rand()
        return hidden + self.head(hidden) * depth


def model() -> nn.Module:
    return Drawing()


experiment = Experiment(name="draws_forward", model=Component(name="model"), data=Component(name="data"), **SETTINGS)
__all__ = ["data"]
