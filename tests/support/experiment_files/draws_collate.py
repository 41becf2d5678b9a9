"""Does collate draw the same wherever it is called: in the process that trains, or in one that loads data?"""

import random

import numpy as np
import torch
from draws import SETTINGS, data, layers
from torch import Tensor, nn

from ddp_core import Component, Experiment


def model() -> nn.Module:
    return layers()


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    rows = torch.stack([row for row, _ in samples])
    noise = torch.randn(rows.shape) + np.random.rand()
    return rows * random.uniform(0.5, 1) + noise, torch.stack([number for _, number in samples])


experiment = Experiment(name="draws_collate", model=Component(name="model"), data=Component(name="data"), **SETTINGS)
__all__ = ["data"]
