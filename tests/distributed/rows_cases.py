"""What the worker processes of test_rows.py run: each checks on its rank what `OwnsRows` promises."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ddp_core.base.errors import UserError
from ddp_core.checkpoint import CutTensor
from ddp_core.reduction import ExactReduction, communication
from ddp_core.reduction.refusal import DependsOnLayout
from ddp_core.sharding import OwnsPieces, Sharding, rows
from ddp_core.sharding.rows import OwnsRows
from tests.distributed.exact_cases import process_group
from tests.distributed.sharded_cases import described

MICRO_BATCHES, WIDTH = 5, 6
TIMEOUT = timedelta(seconds=77)


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


def message(action: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    """With which the action fails."""
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError("it did not fail")


@contextlib.contextmanager
def sharded(**how: Any) -> Iterator[tuple[Net, torch.optim.Optimizer, OwnsRows]]:
    """A net on all ranks; all of it is gone at the end: nothing may outlive the process group."""
    module = net()
    optimizer = adam(module)
    # Tried elsewhere, and longer than all else here.
    with mock.patch("ddp_core.sharding.owns_part.require_elementwise"):
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


def is_seen_by_its_parts(rank: int, world_size: int) -> None:
    """What names, kinds and memory the parts have, before and between passes."""
    reference = net().state_dict()
    with process_group():
        with (
            mock.patch.object(rows, "own_group", wraps=rows.own_group) as gathers,
            mock.patch.object(communication, "own_group", wraps=communication.own_group) as sums,
            sharded(timeout=TIMEOUT) as (module, _, owned),
        ):
            assert [call.args[2] for call in (*gathers.call_args_list, *sums.call_args_list)] == [TIMEOUT] * 2
            groups = {each.device_mesh.get_group().group_name for each in module.parameters()}
            assert len(groups) == 1
            assert groups != {_world().group_name}, "gathers do not mix with what the caller sends"
            weights = owned.described_weights()
            assert list(weights) == list(reference)
            for name, value in reference.items():
                theirs = weights[name]
                if isinstance(value, Tensor):
                    assert (theirs.dtype, theirs.shape) == (value.dtype, value.shape), name
                    assert theirs.untyped_storage().nbytes() <= theirs.element_size(), "no memory for what is described"
                else:
                    assert theirs == value
            own = owned.own_weights()
            assert own["first.weight"] is own["last.weight"]
            assert {name for name, value in own.items() if isinstance(value, CutTensor)} == {
                name for name, _ in module.named_parameters(remove_duplicate=False)
            }
            frozen = {"frozen"}
            assert set(owned.trained) == {name for name in own if isinstance(own[name], CutTensor)} - frozen
            assert set(owned.made_by_backward()) == set(owned.trained) - {"last.weight"}
            assert {each.name for each in owned.owned} == set(owned.trained) - {"last.weight"} | frozen
            with torch.no_grad():
                module(inputs(0, 0))
            assert not isinstance(module.row, DTensor), "what is outside of blocks stays whole after a forward"
            assert all(isinstance(layer.weight, DTensor) for layer in module.layers), "blocks do not"
            before = described(owned.whole_weights())
            with owned.unsent_pass():
                module.norm.eval()
                module(inputs(0, 0)).sum().backward()
            assert described(owned.whole_weights()) == before
            assert owned.whole_gradients() == (None if rank else {})
            written(module, owned, loses=True)
        with sharded(exact=False) as (module, _, owned):
            assert not isinstance(owned.reduction, ExactReduction)
            written(module, owned, loses=False)
        cut = [Sharding("parameters").cut(module, adam(module), 4, _world(), exact=False) for module in [net()]]
        cut += [Sharding("parameters").cut(module, adam(module), 4, _world()) for module in [net()]]
        assert [type(each) for each in cut] == [OwnsRows] * 2
        assert [isinstance(each.reduction, ExactReduction) for each in cut] == [False, True]
        assert list(cut[1].reduction.share) == list(range(rank, 4, world_size))
        assert len(cut[0].optimizer.param_groups[0]["params"]) == len(cut[0].owned)
        for each in cut:
            each.reduction.close()
            each.close()
        del each
        cut.clear()
        gc.collect()


def written(module: Net, owned: OwnsRows, loses: bool) -> None:
    """A forward writes to a weight of a block, which is freed after the forward."""
    module.layers[1].writes = True  # type: ignore[assignment]

    def alone() -> None:
        with owned.forward_alone(), torch.no_grad():
            module(inputs(0, 0))

    if not loses:
        alone()
        return
    assert "forward changes the parameter layers.1.weight" in message(alone, DependsOnLayout)

    def trained() -> None:
        reduction = owned.reduction
        reduction.begin()  # type: ignore[union-attr]
        with reduction.micro_batch(reduction.share[0]):
            module(inputs(0, 0)).sum().backward()

    assert "forward changes the parameter layers.1.weight" in message(trained, DependsOnLayout)


def refuses(rank: int, world_size: int) -> None:
    """What does not fit is refused with what is wrong, on all ranks, before anybody waits."""

    def owns(module: nn.Module, micro_batches: int = MICRO_BATCHES, exact: bool = True) -> Callable[[], Any]:
        return lambda: OwnsRows(module, adam(module), micro_batches, process_group=_world(), exact=exact)

    def in_pieces() -> None:
        module = net()
        OwnsPieces(module, adam(module), MICRO_BATCHES, process_group=_world())

    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64))
    with process_group():
        pattern = r"the parameters of this model cannot be sharded: .*dtype.*; or use shard mode gradients"
        assert re.fullmatch(pattern, message(owns(mixed), UserError))
        assert "micro_batches is 5 on rank 0, but 6 on rank 1" in message(owns(net(), MICRO_BATCHES + rank))
        assert " is another on rank 1 than on rank 0" in message(owns(net(rank)))
        assert " is another on rank 1 than on rank 0" in message(owns(net(rank), exact=False))
        said = message(in_pieces if rank else owns(net()))
        assert "shares is strided, in rows on rank 0, but contiguous, in " in said
        assert "micro-batch" in message(owns(net(), 1))
        with sharded() as (_, _, owned):
            whole = net().state_dict()
            short = {name: value for name, value in whole.items() if name != "norm.bias"}
            assert "norm.bias is in the state alone, or in the model alone" in message(
                lambda: owned.load_weights(short)
            )
            long = whole | {"a": torch.ones(1)}
            assert "a is in the state alone, or in the model alone" in message(lambda: owned.load_weights(long))
            wrong = whole | {"row": torch.ones(2, WIDTH)}
            assert "row has the shape [1, 6], not [2, 6]" in message(lambda: owned.load_weights(wrong))
