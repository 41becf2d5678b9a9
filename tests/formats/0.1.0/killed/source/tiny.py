"""Is a file of an earlier version still read? Two small layers on eight numbers, four steps, for tests/formats.

The samples are computed and not drawn, so that they are the same with every torch.
"""

import torch
from torch import nn

from ddp_core import Component, Experiment, Optimizer, Splits


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def numbers() -> Splits:
    rows = torch.arange(36, dtype=torch.float32).reshape(12, 3) / 36
    samples = [(row, row.sum(dim=0, keepdim=True)) for row in rows]
    return Splits(train=samples[:8], test=samples[8:])


experiment = Experiment(
    name="tiny",
    model=Component(name="two_layers"),
    data=Component(name="numbers"),
    loss="mean_squared_error",
    optimizer=Optimizer(name="sgd", lr=0.1, momentum=0.9),
    ema_decay=0.5,
    global_batch_size=4,
    micro_batch=2,
    epochs=2,
    reduction="exact",
    numerics="portable",
)
