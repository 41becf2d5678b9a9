"""Parameters that torch's fully_shard cuts between ranks that are threads: gradients and states of one process."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ddp_core.base.errors import UserError
from ddp_core.sharding.rows import OwnsRows
from tests.core.sharding.test_pieces_on_threads import STEPS, bits, trained
from tests.core.sharding.thread_world import on_thread_world


class Sometimes(nn.Module):
    """A block that every forward calls, and that uses its parameters only when it is told to."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(37, 5, dtype=dtype)

    def forward(self, hidden: Tensor, is_used: bool) -> tuple[Tensor, Tensor | None]:
        return hidden * 1.5, self.layer(hidden).sum() if is_used else None


class Net(nn.Module):
    """Blocks with rows that two or three ranks cannot share equally; not every micro-batch uses every parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = [(6, 37), (37, 2), (2, 37), (3, 5)]
        self.layers = nn.ModuleList(nn.Linear(*size, dtype=dtype) for size in sizes)
        self.layers.append(Sometimes(dtype))
        self.layers[1].bias.requires_grad_(False)
        self.layers[3].requires_grad_(False)
        self.signs, self.unused = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
        # Of several blocks of the norm, which ranks cut within.
        self.head = nn.Linear(37, 60, dtype=dtype)
        self.register_buffer("steps", torch.zeros((), dtype=dtype))

    def forward(self, rows: Tensor, index: int) -> Tensor:
        hidden = rows
        for layer in self.layers[:3]:
            hidden = torch.tanh(layer(hidden))
        hidden, more = self.layers[4](hidden, is_used=index == 3)
        loss: Tensor = self.head(hidden).square().sum()
        # Gradients of -0.0 show where any other zero is added to them.
        return loss if more is None else loss + (more + self.signs.sum()) * -0.0

    def loss(self, step: int, index: int) -> Tensor:
        """Of one micro-batch."""
        generator = torch.Generator().manual_seed(10 * step + index)
        loss: Tensor = self(torch.randn(3, 6, generator=generator, dtype=self.steps.dtype), index)
        return loss


@functools.cache
def net(dtype: torch.dtype) -> Net:
    torch.manual_seed(0)
    return Net(dtype)


@pytest.fixture(autouse=True, scope="module")
def made_before_the_ranks() -> None:
    """Ranks that are threads have one random generator."""
    for dtype in (torch.float32, torch.float64):
        net(dtype)


def train(dtype: torch.dtype, group: Any) -> Any:
    """What a training in rows comes to, or one in one process."""
    made = copy.deepcopy(net(dtype))
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    how = {"process_group": group, "fewest_elements": 1}
    return trained(made, optimizer, OwnsRows(made, optimizer, max(STEPS), **how) if group is not None else None)


@pytest.mark.parametrize(
    ("world_size", "dtype", "is_old"),
    [(1, torch.float32, False), (2, torch.float64, False), (3, torch.float32, False), (2, torch.float32, True)],
)
def test_a_training_has_the_bits_of_one_process(
    world_size: int, dtype: torch.dtype, is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch before 2.13 has no name for zeros in the place of gradients that are missing."""
    if is_old:
        monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
    expected = list(map(bits, train(dtype, None)))
    first, *others = on_thread_world(world_size, functools.partial(train, dtype))
    assert list(map(bits, first)) == expected
    for other in others:
        # Whole tensors are on rank 0 alone, the norms everywhere.
        assert [bits(each) for each in other] == [each if "norm" in each else None for each in expected]


def test_rows_are_sent_as_the_nodes_lie_and_wait_as_they_were_told() -> None:
    made = net(torch.float32)

    def sent(nodes: tuple[int, ...], group: Any) -> Any:
        layer = copy.deepcopy(made)
        optimizer = torch.optim.SGD(layer.parameters())
        given: dict[str, Any] = {"process_group": group, "timeout": timedelta(seconds=9), "node": nodes[group.rank()]}
        owned: Any = OwnsRows(layer, optimizer, 4, **given)
        channel = owned.reduction._channel
        told = channel.group.asked[1], channel.ordered_sum.groups, type(owned._rounds._parts).__name__
        owned.reduction.close()
        owned.close()
        return told

    wait = timedelta(seconds=9)
    assert on_thread_world(3, functools.partial(sent, (7, 7, 7))) == [(wait, (), "PartsInOneLevel")] * 3
    told = (wait, ((0, 1), (2,)), "PartsInOneLevel")
    assert on_thread_world(3, functools.partial(sent, (7, 7, 8))) == [told] * 3
    told = (wait, ((0, 1), (2, 3)), "PartsInTwoLevels")
    assert on_thread_world(4, functools.partial(sent, (7, 7, 8, 8))) == [told] * 4


@contextlib.contextmanager
def in_rows(module: nn.Module, micro_batches: int, group: Any) -> Iterator[tuple[Any, OwnsRows]]:
    """A copy of the module, of which this rank owns rows."""
    made = copy.deepcopy(module)
    owned = OwnsRows(made, torch.optim.SGD(made.parameters()), micro_batches, process_group=group, fewest_elements=1)
    yield made, owned
    owned.reduction.close()  # what a backward has sent may still be on its way
    owned.close()


def test_gradients_that_are_made_outside_of_a_micro_batch_are_refused() -> None:
    def refused(group: Any) -> None:
        with in_rows(net(torch.float32), 2, group) as (made, owned):
            with owned.reduction.micro_batch(group.rank()):
                made.loss(0, 0).backward()
            with pytest.raises(RuntimeError, match=r"backward outside of ExactReduction\.micro_batch"):
                made.loss(0, 0).backward()

    on_thread_world(2, refused)


def test_gradients_that_come_in_several_parts_are_refused() -> None:
    def twice(made: Net) -> None:
        made.loss(0, 0).backward()
        made.loss(0, 0).backward()

    def refused(group: Any) -> None:
        with in_rows(net(torch.float32), 2, group) as (made, owned):
            said = r"the block with .* hands over its gradients in several parts"
            with pytest.raises(RuntimeError, match=said), owned.reduction.micro_batch(group.rank()):
                twice(made)

    on_thread_world(2, refused)


def test_a_step_without_its_idle_pass_is_refused() -> None:
    def refused(group: Any) -> None:
        said = ("micro-batch 0 of range.* has not been run", "this rank has not run the step's idle pass")[group.rank()]
        with in_rows(net(torch.float32), 3, group) as (_, owned):
            owned.reduction.begin(1)
            with pytest.raises(RuntimeError, match=said):
                owned.reduction.finish()

    on_thread_world(2, refused)


class Aside(nn.Module):
    """Uses the weight of a layer without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.layers[0].weight.T


class Experts(nn.Module):
    """Calls all experts, and makes its output of some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, rows: Tensor, chosen: int) -> Tensor:
        rows = self.head(rows)
        outputs: list[Tensor] = [torch.tanh(expert(rows)) for expert in self.experts]
        return outputs[chosen]


def test_a_block_that_is_used_without_a_call_is_refused() -> None:
    aside = Aside()

    def refused(group: Any) -> None:
        with in_rows(aside, 2, group) as (made, owned):
            said = "its forward uses the parameters of a module"
            with pytest.raises(UserError, match=said), owned.reduction.micro_batch(group.rank()):
                made(torch.ones(1, 4))

    on_thread_world(2, refused)


def test_a_loss_that_depends_on_other_blocks_is_refused() -> None:
    """A backward would gather them in another sequence, and take the parameters of one for those of another."""
    experts = Experts()

    def refused(group: Any) -> None:
        with in_rows(experts, 2, group) as (made, owned):
            said = r"its backward comes to experts\.0 and experts\.2 in another sequence"
            with pytest.raises(UserError, match=said), owned.reduction.micro_batch(group.rank()):
                made(torch.ones(1, 4), 2 * group.rank()).sum().backward()

    on_thread_world(2, refused)


def test_the_ranks_of_a_group_need_not_be_all_ranks() -> None:
    def train_on_two(world: Any) -> Any:
        group = dist.new_group([1, 2])
        return train(torch.float64, group) if world.rank() else None

    _, first, second = on_thread_world(3, train_on_two)
    assert list(map(bits, first)) == list(map(bits, train(torch.float64, None)))
    assert [each for each in second if each and "norm" not in each] == []
