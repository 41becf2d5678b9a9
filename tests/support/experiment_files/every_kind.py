"""Do frozen, tied and unused parameters, and some without a gradient in most micro-batches, keep their bits anywhere?

Each global batch of 48 is cut into eight micro-batches of 6.
"""

import torch
from torch import Tensor, nn

from ddp_core.config.experiment import Component, DdpOptions, Experiment, Optimizer


class EveryKind(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.tied, self.again = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.again.weight = self.tied.weight
        self.sometimes, self.never = nn.Linear(width, width), nn.Parameter(torch.ones(3))
        self.last = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(torch.tanh(self.first(images.flatten(1)))))
        hidden = torch.tanh(self.again(torch.tanh(self.tied(hidden))))
        if int(images[0].sum() * 16) % 3 == 0:
            hidden = hidden + self.sometimes(hidden)
        out: Tensor = self.last(hidden)
        return out


def model(width: int = 67) -> nn.Module:
    return EveryKind(width)


experiment = Experiment(
    name="every_kind",
    data=Component(name="digits", options={"augment": False}),
    optimizer=Optimizer(name="adamw", lr=0.01, weight_decay=0.05),
    clip_norm=0.5,
    global_batch_size=48,
    micro_batch=6,
    max_steps=4,
    ddp=DdpOptions(find_unused_parameters=True),
)
