"""Pieces of parameters on ranks that are threads: gradients, norms, weights and optimizer state of one process."""

from __future__ import annotations

import copy
import functools
from datetime import timedelta
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.checkpoint import CutTensor
from ddp_core.reduction import ExactReduction
from ddp_core.sharding import OwnsPieces
from ddp_core.sharding.owns_part import whole_on_first
from tests.support.thread_world import on_thread_world

STEPS = (5, 1, 4)
Dealt = Literal["contiguous", "strided"]


class Net(nn.Module):
    """Parameters of two dtypes: tied, frozen, unused, used once, tiny, and large enough to be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 700)
        self.norm = nn.BatchNorm1d(700)
        self.second = nn.Linear(700, 6)
        self.again = nn.Linear(6, 700, bias=False)
        self.again.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.signs, self.unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3000))
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, rows: Tensor, index: int) -> Tensor:
        hidden = self.second(torch.tanh(self.norm(self.first(rows)) + self.again(rows)))
        loss: Tensor = (hidden.square().double() * self.scale[0]).sum()
        # A gradient of -0.0 shows where any other zero is added to it.
        return loss + self.signs.sum() * -0.0 if index == 3 else loss

    def loss(self, step: int, index: int) -> Tensor:
        """Of one micro-batch."""
        loss: Tensor = self(torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + index)), index)
        return loss

    def get_extra_state(self) -> Any:
        """No tensor."""
        return "version 2"

    def set_extra_state(self, state: Any) -> None:
        """See above."""
        assert state == "version 2"


@functools.cache
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def bits(tensors: Any) -> Any:
    """Values with their signs, for a comparison."""
    return tensors and {
        name: (str(each.dtype), each.stride(), str(each.tolist())) if isinstance(each, Tensor) else each
        for name, each in tensors.items()
    }


def optimizer(made: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)


def train(shares: Dealt | None, group: Any) -> list[Any]:
    """What a training comes to: of each step the gradients and their norm; the weights; the optimizer's state.

    `shares`: None for one process that owns all.
    """
    made = copy.deepcopy(net())
    updates = optimizer(made)
    owned: Any = OwnsPieces(made, updates, max(STEPS), process_group=group, shares=shares) if shares else None
    reduction = owned.reduction if owned else ExactReduction(made, max(STEPS))
    found: list[Any] = []
    for step, micro_batches in enumerate(STEPS):
        reduction.begin(micro_batches)
        for index in reduction.share:
            with reduction.micro_batch(index):
                made.loss(step, index).backward()
        assert not owned or owned.idle_passes == 0
        reduction.finish(1 / micro_batches)
        named = {name: each.grad for name, each in made.named_parameters() if each.grad is not None}
        found.append(owned.whole_gradients() if owned else {name: each.clone() for name, each in named.items()})
        found.append({"norm": reduction.clip_gradients_(3.0)})
        updates.step()
    found.append({name: each.clone() for name, each in made.named_parameters()})
    if owned:
        found += [owned.whole_weights(), *momenta(owned.whole_state())]
        reduction.close()
        owned.close()
        return found
    return [*found, made.state_dict(), *momenta(updates.state_dict())]


def momenta(state: Any) -> list[Any]:
    return [{str(number): each["momentum_buffer"] for number, each in state["state"].items()}] if state else [None]


@functools.cache
def expected() -> list[Any]:
    return list(map(bits, train(None, None)))


def check(ranks: list[Any]) -> None:
    assert list(map(bits, ranks[0])) == expected()
    for other in ranks[1:]:
        # The norms and the weights are everywhere, what else is whole on rank 0 alone.
        everywhere = [1, 3, 5, 6, 7]
        assert [bits(other[at]) for at in everywhere] == [expected()[at] for at in everywhere]
        assert [each for at, each in enumerate(other) if at not in everywhere] == [None] * 4


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("shares", ["contiguous", "strided"])
def test_a_training_has_the_bits_of_one_process(shares: Dealt, world_size: int) -> None:
    check(on_thread_world(world_size, functools.partial(train, shares)))
