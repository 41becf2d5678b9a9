"""What the worker processes of test_exact_reduction.py run; imports no test framework, so that they start fast."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ddp_core.base.digests import optimizer_digest, weights_digest
from ddp_core.reduction import ExactReduction
from ddp_core.reduction.exchange import PointToPoint
from ddp_core.reduction.parts import Parts
from ddp_core.reduction.strided import RoundSum
from ddp_core.sharding import OwnsPieces

Shares = Literal["contiguous", "strided"]
SAMPLES = 3
CLASSES = 5


class ConvolutionalNet(nn.Module):
    """Convolutions, both kinds of batch-norm momentum, dropout: about 4,000 parameters in ten tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.first_norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 16, 3, padding=1)
        self.second_norm = nn.BatchNorm2d(16, momentum=None)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(16 * 3 * 3, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.max_pool2d(torch.relu(self.first_norm(self.first(images))), 2)
        hidden = torch.relu(self.second_norm(self.second(hidden)))
        return self.head(self.dropout(hidden.flatten(1)))


class MixedNet(nn.Module):
    """One layer each of three dtypes, and a parameter that no micro-batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9, dtype=torch.float64)
        self.second = nn.Linear(9, 7, dtype=torch.bfloat16)
        self.head = nn.Linear(7, CLASSES)
        self.never = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.sometimes_unused = True

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(rows.double()))
        return self.head(self.second(hidden.bfloat16()).float())


@dataclass(frozen=True)
class Case:
    """One training, to be repeated on every layout."""

    net: Callable[[], nn.Module] = ConvolutionalNet
    sample_shape: tuple[int, ...] = (1, 6, 6)
    optimizer: str = "sgd"
    micro_batches: int = 8
    steps: Sequence[int] = (8, 8, 8)
    ddp: dict[str, Any] = field(default_factory=dict)
    wrapped: bool = True


def digest_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Over weights, buffers and optimizer state."""
    return weights_digest(module.state_dict()) + optimizer_digest(optimizer.state_dict())


def described(state: Any) -> str:
    """A text that differs wherever two states do: in keys and their sequence, values, dtypes, shapes and strides."""
    if isinstance(state, dict):
        return "{" + ",".join(f"{key!r}:{described(value)}" for key, value in state.items()) + "}"
    if isinstance(state, list | tuple):
        return "[" + ",".join(map(described, state)) + "]"
    if isinstance(state, Tensor):
        return f"{state.stride()}{weights_digest({'': state})}"
    return repr(state)


def wrap(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """A DDP module that does not broadcast buffers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames broadcast_buffers; 2.11 does not
        return DistributedDataParallel(module, broadcast_buffers=False, **options)


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Start gloo, and end it in an order that cannot hang; no communication thread may be left."""
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()
    assert "exact-reduction" not in [thread.name for thread in threading.enumerate()]


WAYS = ("contiguous", "strided", "strided in parts")


def train(case: Case, world_size: int, way: str = "contiguous", node: int = 0) -> str:
    """Train as one of `world_size` ranks (0: without a process group) on node `node`; return the digest.

    "in parts" cuts even those tensors that are so small that every rank would sum them whole.
    """
    one_round_bytes = -1 if way.endswith("in parts") else PointToPoint.one_round_bytes
    with mock.patch.object(PointToPoint, "one_round_bytes", one_round_bytes):
        return _train(case, world_size, "contiguous" if way.startswith("contiguous") else "strided", node)


def _train(case: Case, world_size: int, shares: Shares, node: int) -> str:
    torch.manual_seed(0)
    net = case.net()
    optimizer: torch.optim.Optimizer
    if case.optimizer == "sgd":
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    wrapped = case.wrapped and world_size > 0
    group = dist.group.WORLD if world_size > 0 and not case.wrapped else None
    module = wrap(net, **case.ddp) if wrapped else net
    with ExactReduction(module, case.micro_batches, process_group=group, shares=shares, node=node) as exact:
        for step, micro_batches in enumerate(case.steps):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(micro_batches, SAMPLES, *case.sample_shape, generator=generator)
            targets = torch.randint(0, CLASSES, (micro_batches, SAMPLES), generator=generator)
            exact.begin(micro_batches)
            for index in exact.share:
                assert exact.remaining[0] == index
                with exact.micro_batch(index, weight=1.0 + index):
                    torch.manual_seed(1000 * step + index)
                    outputs = exact.module(inputs[index])
                    cross_entropy(outputs, targets[index], reduction="sum").backward()
            assert not exact.remaining
            exact.finish(scale=1 / (SAMPLES * micro_batches))
            exact.clip_gradients_(1.0)
            optimizer.step()
        result = digest_of(net, optimizer)
        unused = [name for name, parameter in net.named_parameters() if parameter.grad is None]
    assert unused == (["never"] if getattr(net, "sometimes_unused", False) else []), unused
    return result


TINY_BUCKETS = {"bucket_cap_mb": 0.0005}
TRAININGS = {
    "adamw": Case(optimizer="adamw", ddp={"gradient_as_bucket_view": True, **TINY_BUCKETS}),
    "blocking": Case(wrapped=False),
    "static graph": Case(ddp={"static_graph": True}, steps=(8, 3, 8)),
    "incomplete batches": Case(micro_batches=12, steps=(12, 1, 12, 5, 2, 12), ddp=TINY_BUCKETS),
    "three dtypes": Case(net=MixedNet, sample_shape=(6,), wrapped=False),
}


def sum_in_rounds(parts: Parts, leaves: Sequence[Tensor]) -> Tensor:
    """Sum the leaves as ranks with strided shares do."""
    total = RoundSum(parts, leaves[0].numel(), leaves[0], len(leaves))
    for first in range(0, len(leaves), parts.world_size):
        mine = first + parts.rank
        for _ in total.push(leaves[mine].clone() if mine < len(leaves) else None):
            pass
    return total.total()


class _Nothing(torch.autograd.Function):
    """Passes numbers on and no gradient back, so that autograd comes by a parameter without one."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor) -> Tensor:
        return numbers.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        return None


class ZeroNet(nn.Module):
    """A weight whose gradient is -0.0 in the micro-batches named, and missing in all others."""

    def __init__(self, present: Sequence[int], left_out: bool) -> None:
        super().__init__()
        self.present, self.left_out = present, left_out
        self.weight, self.always = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))

    def forward(self, index: int) -> Tensor:
        total = self.always.sum()
        if index in self.present:
            return total + (self.weight * -0.0).sum()
        return total if self.left_out else total + _Nothing.apply(self.weight).sum()


ZEROS = ((0,), (3,), (7,), (0, 7))
ZERO_MICRO_BATCHES = 8


def zero_signs(world_size: int, present: Sequence[int]) -> dict[str, list[float]]:
    """The signs of a weight's gradient by how it was reduced; a missing gradient that counts as +0.0 makes them +1."""
    group = dist.group.WORLD if world_size else None
    found = {}
    for way in ("contiguous", "found unused", "without DDP", "strided") if world_size else ("alone",):
        net = ZeroNet(present, left_out=way == "found unused")
        wrapped = way in ("contiguous", "found unused", "strided")
        module = wrap(net, find_unused_parameters=way == "found unused") if wrapped else net
        shares: Shares = "strided" if way == "strided" else "contiguous"
        with ExactReduction(
            module, ZERO_MICRO_BATCHES, process_group=None if wrapped else group, shares=shares
        ) as exact:
            exact.begin()
            for index in exact.share:
                with exact.micro_batch(index):
                    module(index).backward()
            exact.finish()
        assert net.weight.grad is not None
        found[way] = torch.copysign(torch.ones(3), net.weight.grad).tolist()
        del exact, module
    return found


def everything(rank: int, world_size: int) -> dict[str, Any]:
    """Run all cases in the same processes; return their digests by name."""
    with process_group():
        digests = {(name, way): train(case, world_size, way) for name, case in TRAININGS.items() for way in WAYS}
        zeros = [zero_signs(world_size, present) for present in ZEROS]
    return {"digests": digests, "zeros": zeros}


def everything_on_one_process(rank: int, world_size: int) -> dict[str, str]:
    """The reference digests: the same trainings without a process group."""
    return {name: train(case, 0) for name, case in TRAININGS.items()}


def fail_on_one_rank(rank: int, world_size: int, where: str, shares: Shares, nodes: int, is_cut: bool) -> str:
    """Train until rank 1 fails in its third step; return the error that this rank saw.

    `is_cut`: each rank owns pieces of the parameters; else gradients are whole, and DDP has them.
    """
    dist.init_process_group("gloo")
    net, node = ConvolutionalNet(), rank * nodes // world_size
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    module: nn.Module = wrap(net, bucket_cap_mb=0.0005)
    owned: OwnsPieces | None = None
    if nodes > 1:
        PointToPoint.one_round_bytes = -1
    if is_cut:
        module = net
        owned = OwnsPieces(net, optimizer, 6, process_group=dist.group.WORLD, shares=shares, node=node)
    exact = ExactReduction(module, 6, shares=shares, node=node) if owned is None else owned.reduction
    message = ""
    try:
        for step in range(5):
            failing = rank == 1 and step == 2
            for index in exact.share:
                last = index == exact.share[-1]
                with exact.micro_batch(index):
                    if failing and last and where == "forward":
                        raise RuntimeError("failed on purpose")
                    loss = module(torch.randn(2, 1, 6, 6)).sum()
                    if failing and last and where == "between backwards":
                        loss.register_hook(_fail)
                    if failing and last and where == "exchange":
                        exact._channel.ordered_sum.phases = _fail  # type: ignore[method-assign]
                        exact._channel.by_parts.fold = _fail  # type: ignore[method-assign]
                    loss.backward()
            exact.finish()
            optimizer.step()
    except RuntimeError as error:
        message = str(error)
    exact.close()
    if owned is not None:
        owned.close()
    # This process leaves without an orderly end, and the other ranks must notice.
    del owned, exact, module, net, optimizer
    gc.collect()
    dist.destroy_process_group()
    return message


def _fail(*_: Any) -> Any:
    raise RuntimeError("failed on purpose")


def give_no_gradient_in_a_later_step(rank: int, world_size: int) -> str:
    """Train until a Function gives a weight no gradient in any micro-batch of the fourth step; return the error."""
    dist.init_process_group("gloo")
    net = ZeroNet(present=range(4), left_out=False)
    module = wrap(net)
    exact = ExactReduction(module, 4)
    message = ""
    try:
        for step in range(5):
            net.present = range(0 if step == 3 else 4)
            for index in exact.share:
                with exact.micro_batch(index):
                    module(index).backward()
            exact.finish()
    except RuntimeError as error:
        message = f"step {step}: {error}"
    exact.close()
    del exact, module
    gc.collect()
    dist.destroy_process_group()
    return message


def run_document(rank: int, world_size: int, code: str, distributed: bool) -> str:
    """Run the script of the how-to, with torchrun's variables or without; return what it prints."""
    printed = io.StringIO()
    if not distributed:
        del os.environ["RANK"]
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        exec(compile(code, "the how-to", "exec"), {})
    return printed.getvalue()
