"""What the worker processes of test_rows.py run: each checks on its rank what `OwnsRows` promises."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.reduction import ExactReduction
from ddp_core.sharding.rows import OwnsRows
from tests.distributed.exact_cases import process_group
from tests.distributed.sharded_cases import described

MICRO_BATCHES, WIDTH = 5, 6


class Layer(nn.Linear):
    """Writes to its weight when it is told to."""

    writes = False

    def forward(self, rows: Tensor) -> Tensor:
        if self.writes:
            with torch.no_grad():
                self.weight.add_(0)
        return super().forward(rows)


class Net(nn.Module):
    """Two blocks, a tied weight, one of a single row, a frozen one, buffers, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.row = nn.Parameter(torch.ones(1, WIDTH))
        self.frozen = nn.Parameter(torch.ones(3, WIDTH), requires_grad=False)
        self.told = "at first"

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.norm(self.first(rows) * self.row)
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        return self.last(rows) + self.frozen.sum(0)

    def get_extra_state(self) -> str:
        return self.told

    def set_extra_state(self, state: str) -> None:
        self.told = state


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, foreach=True)


def inputs(step: int, index: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + index))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, owned: OwnsRows | None, steps: range) -> str:
    """The norms of these steps."""
    reduction = ExactReduction(module, MICRO_BATCHES) if owned is None else owned.reduction
    norms = []
    for step in steps:
        reduction.begin()  # type: ignore[union-attr]
        for index in reduction.share:
            with reduction.micro_batch(index):
                module(inputs(step, index)).square().sum().backward()
        for _ in range(owned.idle_passes if owned is not None else 0):
            with owned.idle_pass():  # type: ignore[union-attr]
                (0.0 * module(inputs(step, 0)).sum()).backward()
        reduction.finish(1 / MICRO_BATCHES)
        norms.append(reduction.clip_gradients_(0.5))
        optimizer.step()
    return described(norms)


def states(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    return [described(dict(module.state_dict())), described(optimizer.state_dict())]


@contextlib.contextmanager
def sharded(**how: Any) -> Iterator[tuple[Net, torch.optim.Optimizer, OwnsRows]]:
    """A net on all ranks; all of it is gone at the end: nothing may outlive the process group."""
    module = net()
    optimizer = adam(module)
    made = [OwnsRows(module, optimizer, MICRO_BATCHES, process_group=_world(), fewest_elements=1, **how)]
    try:
        yield module, optimizer, made[0]
    finally:
        made[0].reduction.close()
        made[0].close()
        made.clear()
        del module, optimizer
        gc.collect()


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def trains_as_one_process(rank: int, world_size: int) -> None:
    """Weights and state are those of one process, go on from a whole state, and nothing mixes with other messages."""
    module = net()
    optimizer = adam(module)
    norms = train(module, optimizer, None, range(3))
    whole_weights, whole_state = module.state_dict(), optimizer.state_dict()
    expected = states(module, optimizer)
    nothing = described(None)
    with process_group():
        with sharded() as (module, optimizer, owned):
            assert isinstance(owned.reduction, ExactReduction)
            sent, letter = torch.full((3,), float(rank)), torch.empty(3)
            work = dist.isend(sent, 1 - rank)
            assert work is not None
            assert train(module, optimizer, owned, range(3)) == norms
            dist.recv(letter, 1 - rank)
            assert letter.tolist() == [1.0 - rank] * 3
            work.wait()
            found = [described(owned.whole_weights()), described(owned.whole_state())]
            assert found == ([nothing] * 2 if rank else expected)
        with sharded() as (module, optimizer, owned):
            owned.load_weights(whole_weights | {"_extra_state": "at last"})
            owned.load_state(whole_state)
            assert module.told == "at last"
            module.told = "at first"
            found = [described(owned.whole_weights()), described(owned.whole_state())]
            assert found == ([nothing] * 2 if rank else expected)
