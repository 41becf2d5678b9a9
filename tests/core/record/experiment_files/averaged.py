"""A compiled model whose layers share a matrix, with a moving average: what comes out of such a run again?"""

import torch
from torch import Tensor, nn

from ddp_core import Component, Experiment, Optimizer


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, width), nn.BatchNorm1d(width)
        self.middle, self.again = nn.Linear(width, width), nn.Linear(width, width)
        self.again.weight = self.middle.weight
        self.last = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm(self.first(images.flatten(1))).relu()
        return self.last(self.again(self.middle(hidden).relu()).relu())


def model(width: int = 16) -> nn.Module:
    return torch.compile(Net(width), backend="eager")  # type: ignore[return-value]


experiment = Experiment(
    name="averaged",
    data=Component(name="digits"),
    optimizer=Optimizer(name="adam", lr=0.01),
    global_batch_size=256,
    micro_batch=64,
    epochs=2,
    ema_decay=0.9,
)
