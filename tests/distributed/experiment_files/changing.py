"""Does a model that changes while it is trained end with the same bits on every layout, or is it refused by name?

`--set model.kind=KIND` chooses what is odd about the model. From step 3 on a callback trains its first layer as well,
and from step 5 on the second is frozen.
"""

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_core.config.experiment import Experiment
from ddp_core.data.splits import InMemory, Splits
from ddp_core.observe.callback import Callback, Moment

FEATURES, CLASSES = 12, 5


def data(root: Path) -> Splits:
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(96, FEATURES, generator=draw)
    return Splits(InMemory(inputs, torch.randint(0, CLASSES, (96,), generator=draw)), None)


class Changing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, CLASSES)
        self.first.requires_grad_(False)
        self.register_buffer("seen", torch.full((), torch.nan))
        if kind == "hooks":
            self.last.weight.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
            self.last.bias.register_post_accumulate_grad_hook(trebled)

    def forward(self, rows: Tensor) -> Tensor:
        if self.kind == "counter" or (self.kind == "rare" and rows.max() > 3.5):
            self.seen = torch.nan_to_num(self.seen) + 1
        elif self.kind == "cache":
            self.seen.fill_(torch.nan)
        hidden = self.second(torch.tanh(self.first(rows)))
        if self.kind == "unfreezes" and self.training:
            self.first.requires_grad_()
        if self.kind == "pseudo labels":
            read = [self.still(hidden)]
            shown = self.norm(hidden)
            return self.last(shown + torch.stack([*read, self.still(hidden * 2)]).sum(0))
        return self.last(self.norm(hidden))

    def still(self, hidden: Tensor) -> Tensor:
        """What the layer gives in evaluation mode."""
        self.norm.eval()
        try:
            return copy.deepcopy(self.norm)(hidden).detach() + self.norm(hidden)
        finally:
            self.norm.train()


def trebled(bias: Tensor) -> None:
    bias.grad.mul_(3)


def model(kind: str = "usual") -> nn.Module:
    return Changing(kind)


def optimizer(model: Changing) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="sum")


class Switches(Callback):
    ranks = "all"

    def on_step(self, moment: Moment) -> None:
        if not moment.is_first and moment.model.kind == "rank 0 alone":
            return
        if moment.step == 2:
            moment.model.first.requires_grad_(True)
        if moment.step == 4:
            moment.model.second.requires_grad_(False)


callbacks = [Switches()]
experiment = Experiment(name="changing", global_batch_size=24, micro_batch=4, epochs=2)
