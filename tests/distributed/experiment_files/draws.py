"""Do numbers depend on where they are drawn: in collate, and in forward or by the optimizer, as `model.kind` says?

`draws_metrics` has the data and the layers from here.
"""

import random

import numpy as np
import torch
from torch import Generator, Tensor, nn, randint, randn

from ddp_core import Experiment

SETTINGS = {
    "loss": "cross_entropy",
    "global_batch_size": 24,
    "micro_batch": 4,
    "last_batch": "keep",
    "epochs": 3,
    "reduction": "exact",
    "evaluation": {"samples_per_batch": 4},
}


def data() -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    generator = Generator().manual_seed(1)
    rows, classes = randn(60, 6, generator=generator), randint(3, (60,), generator=generator)
    samples = list(zip(rows, classes, strict=True))
    return samples[:40], samples[40:]


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    rows = torch.stack([row for row, _ in samples])
    noise = torch.randn(rows.shape) + np.random.rand()
    return rows * random.uniform(0.5, 1) + noise, torch.stack([number for _, number in samples])


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


class Drawing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layers, self.head = kind, layers(), nn.Linear(3, 3)

    def forward(self, rows: Tensor) -> Tensor:
        if self.kind == "own seed":
            before = torch.randn(6)
            with torch.random.fork_rng():
                torch.manual_seed(5)
                projection = torch.randn(6, 6)
            rows = rows @ projection + before + torch.rand(6)
        elif self.kind == "forward":
            noise = torch.from_numpy(np.random.standard_normal(6)).float()
            rows = rows * random.uniform(0.5, 1.5) + noise + 0.1 * torch.randn(6)
        hidden = self.layers(rows)
        depth = np.random.rand() if self.kind == "forward" and random.random() > 0.3 else 0.5
        return hidden + self.head(hidden) * depth


class Langevin(torch.optim.SGD):
    """Adds noise to each update, as Langevin dynamics does."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                scale = 0.01 * random.random() * np.random.rand()
                parameter.add_(torch.randn_like(parameter), alpha=scale)


def model(kind: str = "forward") -> nn.Module:
    return Drawing(kind)


def optimizer(model: Drawing) -> torch.optim.Optimizer:
    return (Langevin if model.kind == "optimizer" else torch.optim.SGD)(model.parameters(), lr=0.05)


experiment = Experiment(name="draws", **SETTINGS)
