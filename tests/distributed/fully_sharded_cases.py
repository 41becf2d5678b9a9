"""What the worker processes of test_fully_sharded.py run; imports no test framework, so that they start fast."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests.distributed.exact_cases import CLASSES, ConvolutionalNet, RandomNet, process_group
from tests.distributed.sharded_cases import Case, Training, trained

WORDS = 11


def uneven() -> nn.Module:
    """Layers whose rows no number of ranks divides; on three ranks or more some ranks have none of the third."""
    widths = (6, 37, 10, 2, 33)
    layers = [nn.Linear(before, after) for before, after in itertools.pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())), nn.Linear(33, CLASSES))


def wide() -> nn.Module:
    """Layers with several blocks of the norm, which ranks cut between and within blocks."""
    return nn.Sequential(nn.Linear(6, 1100), nn.Tanh(), nn.Linear(1100, 17), nn.Tanh(), nn.Linear(17, CLASSES))


class Residual(nn.Module):
    """A small residual network with batch normalisation, its blocks in a Sequential."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.first_norm = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
            self.second, self.second_norm = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6, momentum=None)

        def forward(self, images: Tensor) -> Tensor:
            hidden = torch.relu(self.first_norm(self.first(images)))
            return torch.relu(images + self.second_norm(self.second(hidden)))

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.blocks = nn.Sequential(Residual.Block(), Residual.Block())
        self.head = nn.Linear(6, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class Transformer(nn.Module):
    """A small transformer with dropout, one weight for the first layer and the last, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 12), nn.Embedding(6, 12)
        self.places.weight.requires_grad = False
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(12, 2, 20, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.words((rows * 1000).long() % WORDS) + self.places.weight
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden)).mean(1)[:, :CLASSES].contiguous()


def sometimes_unused() -> nn.Module:
    """The data decide which layers are used, and one parameter never is."""
    return RandomNet(random.Random(5), sometimes_unused=True)


def partly_frozen() -> nn.Module:
    """Frozen layers first and among others, and a block of which no micro-batch makes use."""
    net = uneven()
    for position in (0, 4):
        net[position].requires_grad_(False)  # type: ignore[index]

    class WithSpare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.spare = net, nn.ModuleList([nn.Linear(7, 7)])

        def forward(self, rows: Tensor) -> Tensor:
            return self.net(rows)

    return WithSpare()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def fused_sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3, fused=True)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)


def foreach_adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True, amsgrad=True)


def fused_adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)


def two_groups(net: nn.Module) -> torch.optim.Optimizer:
    parameters = list(net.parameters())
    groups = [{"params": parameters[1::2], "weight_decay": 0.0}, {"params": parameters[::2], "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


case = functools.partial(Case, optimizer=fused_adamw)
CASES = {
    "fused": case(uneven),
    "in a loop": case(uneven, optimizer=adamw, micro_batches=6, steps=(6, 6, 6)),
    "foreach": case(uneven, optimizer=foreach_adamw, micro_batches=5, steps=(5, 4, 5)),
    "momentum": case(uneven, optimizer=sgd, micro_batches=4, steps=(4, 4, 4)),
    "fused momentum": case(uneven, optimizer=fused_sgd),
    "two groups": case(uneven, optimizer=two_groups),
    "one block": case(uneven, fewest_elements=1 << 30),
    "clipped": case(wide, clip=0.1),
    "clipped momentum": case(wide, optimizer=sgd, clip=0.1),
    "incomplete batches": case(Residual, sample_shape=(1, 5, 5), steps=(8, 1, 7, 2, 8)),
    "residual network": case(Residual, sample_shape=(1, 5, 5), optimizer=sgd),
    "dropout": case(ConvolutionalNet, sample_shape=(1, 6, 6)),
    "transformer": case(Transformer),
    "bfloat16 autocast": case(Transformer, autocast=True, micro_batches=5, steps=(5, 5, 5)),
    "bfloat16 autocast, clipped": case(Transformer, autocast=True, clip=0.1, steps=(8, 8)),
    "sometimes unused": case(sometimes_unused, fewest_elements=1 << 30),
    "partly frozen": case(partly_frozen),
}


def alone(rank: int, world_size: int, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The digests of these cases in one process without a process group."""
    return {name: trained(CASES[name], None)[0] for name in names}


def everything(rank: int, world_size: int, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The digests of these cases in rows; rank 0 has them."""
    with process_group():
        return {name: trained(CASES[name], "rows")[0] for name in names}


def everything_before_2_13(rank: int, world_size: int, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """As `everything`, on a torch that has no name for zeros in the place of gradients that are missing."""
    if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        del FSDPModule.set_reduce_scatter_unused_params
    return everything(rank, world_size, names)


def trains_as_one_process(rank: int, world_size: int) -> None:
    """With messages of the caller on their way; then another training takes over the state of one process."""
    case = CASES["clipped"]
    single = Training(case, None)
    single.run()
    expected = single.digest() if rank == 0 else ("None", "None")
    with process_group():
        sent, letter = torch.full((3,), float(rank)), torch.empty(3)
        work = dist.isend(sent, 1 - rank)
        assert work is not None
        assert trained(case, "rows")[0] == expected
        dist.recv(letter, 1 - rank)
        assert letter.tolist() == [1.0 - rank] * 3
        work.wait()
        other = Training(case, "rows")
        other.sharded.load_weights(single.net.state_dict())
        other.sharded.load_state(single.optimizer.state_dict())
        assert other.digest() == expected
        other.close()
