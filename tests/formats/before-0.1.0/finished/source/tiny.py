"""Is a file of an earlier version still read? Two small layers on eight numbers, four steps, for tests/formats."""

import torch
from torch import nn

try:
    from ddp_core import Component, Experiment, Optimizer, Splits
except ImportError:  # as this version had them
    from ddp_core.data.splits import Splits
    from ddp_core.spec.experiment import Component, Experiment, Optimizer


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
    global_batch_size=4,
    micro_batch=2,
    epochs=2,
    reduction="exact",
)
