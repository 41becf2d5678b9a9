"""Does a model whose forward writes to its weights end with the same bits on every layout, or is it refused by name?

`--set model.kind=KIND` chooses what it writes, and `--set data.held_out=N` how many samples are held out.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_core.config.experiment import Experiment
from ddp_core.data.splits import InMemory, Splits

WORDS, LENGTH, CLASSES = 40, 6, 5


def data(root: Path, held_out: int = 0) -> Splits:
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randint(0, WORDS, (48, LENGTH), generator=draw)
    targets = torch.randint(0, CLASSES, (48,), generator=draw)
    return Splits(InMemory(inputs, targets), InMemory(inputs[:held_out], targets[:held_out]) if held_out else None)


class Writing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        limits = {"max_norm": 2.0, "max_norm of bags": 2.0, "out of reach": 1000.0}
        layer = nn.EmbeddingBag if kind == "max_norm of bags" else nn.Embedding
        self.words = layer(WORDS, 8, max_norm=limits.get(kind))
        self.last = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.words.weight
        with torch.no_grad():
            if self.kind == "clamp" or (self.kind == "clamp in evaluation" and not self.training):
                weight.clamp_(-0.5, 0.5)
                weight.clamp_(-0.5, 0.5)
            elif self.kind == "rows in evaluation" and not self.training:
                weight[ids.unique()] = weight[ids.unique()].clamp(-0.5, 0.5)
            elif self.kind == "decay":
                self.last.weight.mul_(0.99)
            elif self.kind == "decay unseen":
                self.last.weight.data.mul_(0.99)
            elif self.kind == "rows unseen":
                weight.data[ids.unique()] *= 0.99
        rows = self.words(ids)
        return self.last(rows if rows.dim() == 2 else rows.mean(1))


def model(kind: str = "clamp") -> nn.Module:
    return Writing(kind)


def optimizer(model: Writing) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="sum")


experiment = Experiment(name="writing", global_batch_size=12, micro_batch=4, epochs=2)
