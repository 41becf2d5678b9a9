"""Trainings with optimizers of several groups and entries, in pieces on ranks that are threads: the state is whole."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from ddp_core.reduction import ExactReduction
from ddp_core.sharding import OwnsPieces
from tests.distributed.sharded_cases import described
from tests.support.thread_group import on_threads, use_threads

WAYS: tuple[Literal["contiguous", "strided"], ...] = ("contiguous", "strided")
STEPS = (7, 1, 12, 2, 5)
"""Of so many micro-batches: of some, a rank has none, and five unlike subtrees."""


class Kinds(nn.Module):
    """Parameters that are cut, tied, frozen, used never or by some micro-batches, of two dtypes, of no element."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 45)
        self.norm = nn.BatchNorm1d(45)
        self.tied = nn.Linear(45, 45, bias=False)
        self.frozen = nn.Linear(45, 45).requires_grad_(False)
        self.again = nn.Linear(45, 45)
        self.again.weight = self.tied.weight
        self.optional = nn.ModuleList(nn.Linear(45, 45) for _ in range(2))
        self.never = nn.Parameter(torch.ones(1500))
        self.none = nn.Parameter(torch.ones(0, 3))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.wide = nn.Linear(45, 70, dtype=torch.float64)

    def forward(self, rows: Tensor, used: int) -> Tensor:
        hidden = torch.tanh(self.frozen(self.norm(self.first(rows))))
        hidden = hidden + self.again(torch.tanh(self.tied(hidden)))
        if used < 2:
            hidden = hidden + self.optional[used](hidden)
        return self.wide(hidden.double() * self.scale).tanh() + self.none.sum()


def adam(net: nn.Module) -> torch.optim.Optimizer:
    """Two groups, in another sequence than the module's parameters; a step counter beside what is cut."""
    matrices = [each for each in net.parameters() if each.dim() == 2]
    others = [each for each in net.parameters() if each.dim() != 2]
    return torch.optim.AdamW([{"params": others}, {"params": matrices, "lr": 3e-3, "amsgrad": True}], foreach=True)


def adagrad(net: nn.Module) -> torch.optim.Optimizer:
    """Its state is there before its first step."""
    return torch.optim.Adagrad(net.parameters(), lr=0.01, initial_accumulator_value=0.1)


class Training:
    """Of a copy of `net`, on one rank of a group, or in one process without shards (`way` is None)."""

    def __init__(self, net: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer], way: Any, group: Any):
        self.net = copy.deepcopy(net)
        self.optimizer = make(self.net)
        self.owned: OwnsPieces | None = None
        if way is not None:
            self.owned = OwnsPieces(self.net, self.optimizer, max(STEPS), process_group=group, shares=way)
        self.exact = self.owned.reduction if self.owned else ExactReduction(self.net, max(STEPS))

    def step(self, step: int) -> str:
        """Train one step; returns the norm of the gradients."""
        micro_batches = STEPS[step]
        inputs = torch.randn(micro_batches, 4, 6, generator=torch.Generator().manual_seed(step))
        self.exact.begin(micro_batches)
        for index in self.exact.share:
            with self.exact.micro_batch(index, weight=1.0 + index):
                # Nobody uses the last layer in the first step, and one micro-batch alone the other one.
                used = index % 3 if step else 2 * (index != 1)
                self.net(inputs[index], used).square().sum().backward()
        self.exact.finish(scale=1 / micro_batches)
        norm = self.exact.clip_gradients_(0.5)
        self.optimizer.step()
        return described(norm)

    def state(self) -> Any:
        """The whole state of the optimizer, in the sequence of its parameters; None on all ranks but the first."""
        state = self.owned.whole_state() if self.owned is not None else self.optimizer.state_dict()
        return state and state | {"state": dict(sorted(state["state"].items()))}


def train(net: nn.Module, make: Callable[..., Any], way: Any, group: Any) -> tuple[list[str], str, str]:
    """What each step, and at the end weights and state, look like on this rank."""
    training = Training(net, make, way, group)
    steps = [training.step(step) for step in range(len(STEPS))]
    return steps, described(training.net.state_dict()), described(training.state())


@pytest.fixture(autouse=True)
def on_groups_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)


@functools.cache
def kinds() -> nn.Module:
    torch.manual_seed(0)
    return Kinds()


@functools.cache
def whole(make: Callable[..., Any]) -> tuple[list[str], str, str]:
    """The training of one process."""
    return train(kinds(), make, None, None)


@pytest.mark.parametrize(("world_size", "make"), [(2, adagrad), (5, adam)])
@pytest.mark.parametrize("way", WAYS)
def test_a_training_in_pieces_is_that_of_one_process(world_size: int, way: str, make: Callable[..., Any]) -> None:
    steps, weights, state = whole(make)
    nothing = described(None)
    for rank, found in enumerate(on_threads(world_size, functools.partial(train, kinds(), make, way))):
        of_steps, own_weights, own_state = found
        assert own_weights == weights
        assert own_state == (nothing if rank else state)
        assert of_steps == steps
