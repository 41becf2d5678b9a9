"""Does a small network with BatchNorm, Dropout and momentum end with the same weights whatever happens to its ranks?

The data are random points, because they are quick to make. DOTS_PAUSE makes each micro-batch take some seconds longer,
so that a test has time to hurt a rank, until the file exists that DOTS_HURRY names. A step has six micro-batches of 2
samples, for one, two, three or six ranks.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ddp_core.config.experiment import Component, Experiment, Optimizer
from ddp_core.data.splits import InMemory, Splits, content_digest


class Paced(InMemory):
    """Samples of which each micro-batch takes DOTS_PAUSE seconds longer to fetch."""

    def __getitems__(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        pause, hurry = float(os.environ.get("DOTS_PAUSE", "0")), os.environ.get("DOTS_HURRY")
        if not (hurry and Path(hurry).exists()):
            time.sleep(pause)
        return super().__getitems__(ids)


def dots(size: int = 96, held_out: int = 10) -> Splits:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size + held_out, 6, generator=generator)
    targets = torch.randint(0, 3, (size + held_out,), generator=generator)
    test = InMemory(inputs[size:], targets[size:]) if held_out else None
    return Splits(Paced(inputs[:size], targets[:size]), test, 3, None, content_digest(inputs, targets))


def network(width: int = 12) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3))


experiment = Experiment(
    name="dots",
    model=Component(name="network", options={"width": 12}),
    data=Component(name="dots", options={"size": 96, "held_out": 10}),
    loss="cross_entropy",
    optimizer=Optimizer(name="sgd", lr=0.05, momentum=0.9),
    global_batch_size=12,
    micro_batch=2,
    epochs=10,
    reduction="exact",
)
