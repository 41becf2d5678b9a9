"""Does an optimizer that adds noise to each update, as Langevin dynamics does, add the same everywhere?"""

import random

import numpy as np
import torch
from draws_rows import SETTINGS, data, layers
from torch import nn

from ddp_core import Component, Experiment


class Langevin(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                scale = 0.01 * random.random() * np.random.rand()
                parameter.add_(torch.randn_like(parameter), alpha=scale)


def model() -> nn.Module:
    return layers()


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return Langevin(model.parameters(), lr=0.05)


experiment = Experiment(name="draws_optimizer", model=Component(name="model"), data=Component(name="data"), **SETTINGS)
__all__ = ["data"]
