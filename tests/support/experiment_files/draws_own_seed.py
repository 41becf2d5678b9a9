"""Does a forward that seeds torch itself, inside fork_rng, leave the numbers of all others as they were?"""

import torch
from draws_rows import SETTINGS, data, layers
from torch import nn

from ddp_core import Component, Experiment


class SeedingItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        before = torch.randn(6)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            projection = torch.randn(6, 6)
        return self.layers(rows @ projection + before + torch.rand(6))


def model() -> nn.Module:
    return SeedingItself()


experiment = Experiment(name="draws_own_seed", model=Component(name="model"), data=Component(name="data"), **SETTINGS)
__all__ = ["data"]
