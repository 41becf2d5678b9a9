"""Parameters that torch's fully_shard cuts between ranks that are threads: gradients and states of one process.

Tests sharding/block_parcel.py, too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ddp_core.base.errors import UserError
from ddp_core.checkpoint import CutTensor
from ddp_core.sharding import OwnsPieces
from ddp_core.sharding.rows import OwnsRows, _Gather, gather_by_messages
from tests.core.sharding.test_pieces import STEPS, Net, bits, trained
from tests.support.thread_group import GATHERS, on_thread_world


@functools.cache
def net(dtype: torch.dtype, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(dtype)


@pytest.fixture(autouse=True, scope="module")
def made_before_the_ranks() -> None:
    """Ranks that are threads have one random generator."""
    for dtype in (torch.float32, torch.float64):
        net(dtype)
    net(torch.float32, 1)


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


def test_rows_are_sent_as_the_nodes_lie() -> None:
    made = net(torch.float32)

    def sent(nodes: tuple[int, ...], group: Any) -> Any:
        layer = copy.deepcopy(made)
        optimizer = torch.optim.SGD(layer.parameters())
        given: dict[str, Any] = {"process_group": group, "node": nodes[group.rank()]}
        owned: Any = OwnsRows(layer, optimizer, 4, **given)
        channel = owned.reduction._channel
        told = channel.ordered_sum.groups, type(channel.by_parts).__name__
        owned.reduction.close()
        owned.close()
        return told

    GATHERS.clear()
    assert on_thread_world(3, functools.partial(sent, (7, 7, 7))) == [((), "PartsInOneLevel")] * 3
    told = (((0, 1), (2,)), "PartsInOneLevel")
    assert on_thread_world(3, functools.partial(sent, (7, 7, 8))) == [told] * 3
    told = (((0, 1), (2, 3)), "PartsInTwoLevels")
    assert on_thread_world(4, functools.partial(sent, (7, 7, 8, 8))) == [told] * 4
    assert [(torch.device("cpu"),)] * (3 + 3 + 4) == GATHERS, "gathers have a group of their own"


def owns(module: nn.Module, micro_batches: int, group: Any, fewest_elements: int = 1) -> OwnsRows:
    """Of a copy of the module this rank owns rows."""
    made = copy.deepcopy(module)
    optimizer = torch.optim.SGD(made.parameters())
    return OwnsRows(made, optimizer, micro_batches, process_group=group, fewest_elements=fewest_elements)


@contextlib.contextmanager
def in_rows(module: nn.Module, group: Any, micro_batches: int = 2) -> Iterator[tuple[Any, OwnsRows]]:
    owned = owns(module, micro_batches, group)
    yield owned.module, owned
    owned.reduction.close()  # what a backward has sent may still be on its way
    owned.close()


def test_a_step_without_its_idle_pass_is_refused() -> None:
    def refused(group: Any) -> None:
        said = ("micro-batch 0 of range.* has not been run", "this rank has not run the step's idle pass")[group.rank()]
        with in_rows(net(torch.float32), group, 3) as (_, owned):
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


def test_the_ranks_of_a_group_need_not_be_all_ranks() -> None:
    def train_on_two(world: Any) -> Any:
        group = dist.new_group([1, 2])
        return train(torch.float64, group) if world.rank() else None

    _, first, second = on_thread_world(3, train_on_two)
    assert list(map(bits, first)) == list(map(bits, train(torch.float64, None)))
    assert [each for each in second if each and "norm" not in each] == []


def backward_of(number: int) -> Callable[[Any, int], Any]:
    return lambda made, rank: made(torch.ones(1, 4), number * rank).sum().backward()


def twice(made: Any, _: int) -> None:
    made.loss(0, 0).backward()
    made.loss(0, 0).backward()


@pytest.mark.parametrize(
    ("kind", "work", "error", "said"),
    [
        ("net", twice, RuntimeError, r"the block with .* hands over its gradients in several parts"),
        (Aside, lambda made, _: made(torch.ones(1, 4)), UserError, "its forward uses the parameters of a module"),
        # A backward would gather them in another sequence, and take the parameters of one for those of another.
        (Experts, backward_of(2), UserError, r"its backward comes to experts\.0 and experts\.2 in another sequence"),
    ],
    ids=["in several parts", "without a call", "other blocks"],
)
def test_a_micro_batch_that_cannot_be_right_is_refused(
    kind: Any, work: Callable[[Any, int], Any], error: type[Exception], said: str
) -> None:
    module = net(torch.float32) if kind == "net" else kind()

    def refused(group: Any) -> None:
        rank = group.rank()
        with in_rows(module, group) as (made, own), pytest.raises(error, match=said), own.reduction.micro_batch(rank):
            work(made, rank)

    on_thread_world(2, refused)


def test_gradients_that_are_made_outside_of_a_micro_batch_are_refused() -> None:
    def refused(group: Any) -> None:
        with in_rows(net(torch.float32), group) as (made, owned):
            with owned.reduction.micro_batch(group.rank()):
                made.loss(0, 0).backward()
            with pytest.raises(RuntimeError, match=r"backward outside of ExactReduction\.micro_batch"):
                made.loss(0, 0).backward()

    on_thread_world(2, refused)


def test_blocks_are_freed_after_a_forward_and_what_is_outside_of_them_is_not() -> None:
    def check(group: Any) -> None:
        with in_rows(net(torch.float32), group) as (made, _):
            with torch.no_grad():
                made.loss(0, 0)
            assert not isinstance(made.row, DTensor)
            assert all(isinstance(layer.weight, DTensor) for layer in made.layers[:3])

    on_thread_world(2, check)


def test_what_does_not_fit_is_refused_on_all_ranks() -> None:
    nets, mixed = [net(torch.float32), net(torch.float32, 1)], nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())

    def check(group: Any) -> None:
        def refused(said: str, action: Callable[[], Any], error: type[Exception] = ValueError) -> None:
            with pytest.raises(error, match=said):
                action()

        def in_pieces() -> None:
            made = copy.deepcopy(nets[0])
            OwnsPieces(made, torch.optim.SGD(made.parameters()), 5, process_group=group)

        rank, kinds = group.rank(), r"the parameters of this model cannot be sharded: .*dtype.*; or use shard mode grad"
        refused(kinds, lambda: owns(mixed, 5, group, fewest_elements=99), UserError)
        refused("micro_batches is 5 on rank 0, but 6 on rank 1", lambda: owns(nets[0], 5 + rank, group))
        refused("is not the same on all ranks", lambda: owns(nets[rank], 5, group))
        said = "shares is strided, in rows on rank 0, but contiguous, in "
        refused(said, in_pieces if rank else lambda: owns(nets[0], 5, group))
        refused("2 ranks", lambda: owns(nets[0], 1, group))

    on_thread_world(2, check)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"norm.bias": None}, "norm.bias is in the state alone, or in the model alone"),
        ({"a": torch.ones(1)}, "a is in the state alone, or in the model alone"),
        ({"row": torch.ones(2, 6)}, r"row has the shape \[1, 6\], not \[2, 6\]"),
    ],
)
def test_a_state_of_another_model_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    state = net(torch.float32).state_dict() | change

    def load(group: Any) -> None:
        with in_rows(net(torch.float32), group) as (_, owned), pytest.raises(ValueError, match=said):
            owned.load_weights({name: value for name, value in state.items() if value is not None})

    on_thread_world(2, load)


def test_what_goes_out_has_the_names_and_kinds_of_one_process() -> None:
    reference, other = net(torch.float32).state_dict(), net(torch.float32, 1).state_dict()
    names = {name for name, _ in net(torch.float32).named_parameters(remove_duplicate=False)}
    trained = {name for name in names if net(torch.float32).get_parameter(name).requires_grad}
    loaded = other | {"_extra_state": "at last", "norm.running_mean": torch.ones(6)}

    def check(group: Any) -> None:
        with in_rows(net(torch.float32), group) as (made, owned):
            weights = owned.described_weights()
            assert list(weights) == list(reference)
            for name, value in reference.items():
                if isinstance(value, Tensor):
                    assert (weights[name].dtype, weights[name].shape) == (value.dtype, value.shape), name
                    assert weights[name].untyped_storage().nbytes() <= weights[name].element_size(), "no memory for it"
                else:
                    assert weights[name] == value
            own = owned.own_weights()
            assert own["first.weight"] is own["again.weight"]
            assert {name for name, value in own.items() if isinstance(value, CutTensor)} == names
            assert set(owned.trained) == trained
            assert {each.name for each in owned.owned} == names - {"again.weight"}
            owned.load_weights(loaded)
            assert made.told == "at last"
            found = owned.whole_weights()
            assert group.rank() or list(found) == list(loaded)
            assert bits(found) == (None if group.rank() else bits(loaded))

    on_thread_world(2, check)


@pytest.mark.parametrize(("kind", "ranks", "by_messages"), [("cpu", 1, False), ("cpu", 2, True), ("cuda", 2, False)])
def test_ranks_that_exchange_host_memory_gather_by_messages(
    kind: str, ranks: int, by_messages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In gloo's ring each part would pass through every other rank."""
    asked: list[Any] = []
    given: list[Any] = []
    monkeypatch.setattr("ddp_core.sharding.rows.parts_on", lambda *each: asked.append(each))
    parts: Any = [SimpleNamespace(set_custom_all_gather=given.append) for _ in range(2)]
    group: Any = SimpleNamespace(size=lambda: ranks)
    gather_by_messages(parts, group, ((0,), (1,)), torch.device(kind))
    assert asked == [(group, ((0,), (1,)), torch.device(kind))] * by_messages
    assert [type(each) for each in given] == [_Gather] * 2 * by_messages
