"""What the worker processes of test_sharded.py run; imports no test framework, so that they start fast."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ddp_core.reduction import ExactReduction
from ddp_core.reduction.collectives import CollectiveExchange
from ddp_core.reduction.exchange import Exchange
from ddp_core.reduction.messages import PointToPoint
from ddp_core.sharding import OwnsPieces
from tests.distributed.exact_cases import CLASSES, SAMPLES, ConvolutionalNet, bytes_of, process_group
from tests.distributed.put_together import whole_of

Way = Literal["contiguous", "strided", "rows"]


class EveryKind(nn.Module):
    """Parameters that are tied, frozen, never used, sometimes unused, uneven, tiny, of no dimension and of no element.

    With batch normalisation, and large enough for several cuts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 211)
        self.norm = nn.BatchNorm1d(211)
        self.frozen = nn.Linear(211, 211)
        self.frozen.requires_grad_(False)
        self.tied = nn.Linear(211, 211, bias=False)
        self.again = nn.Linear(211, 211)
        self.again.weight = self.tied.weight
        self.optional = nn.ModuleList(nn.Linear(211, 211) for _ in range(2))
        self.never = nn.Parameter(torch.ones(1500))
        self.none = nn.Parameter(torch.ones(0, 3))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(211, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(self.norm(self.first(rows))))
        hidden = hidden + self.again(torch.tanh(self.tied(hidden))) * self.scale
        # Neither layer is used where the remainder is 2.
        used = int(rows[0, 0].abs() * 1000) % 3
        if used < 2:
            hidden = hidden + self.optional[used](hidden)
        return self.head(hidden) + self.none.sum()


class Tiny(nn.Module):
    """Fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(1))

    def forward(self, rows: Tensor) -> Tensor:
        return (rows[:, :2] * self.weight + self.bias).repeat(1, 3)[:, :CLASSES]


class Large(nn.Module):
    """A layer whose gradient is sent without a copy; it ends within a line of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 601)
        self.large = nn.Linear(601, 599)
        self.head = nn.Linear(599, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(torch.tanh(self.large(torch.tanh(self.first(rows)))))


class TwoTypes(nn.Module):
    """One layer in float64, one in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 130, dtype=torch.float64)
        self.second = nn.Linear(130, 40, dtype=torch.bfloat16)
        self.head = nn.Linear(40, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.first(rows.double())).bfloat16()).float())


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)


def adamw_in_a_loop(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)


def several_groups(net: nn.Module) -> torch.optim.Optimizer:
    """Groups of other options; the sequence of parameters is not the module's, and the last one's state is larger."""
    matrices = [parameter for parameter in net.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in net.parameters() if parameter.dim() <= 1]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": matrices, "lr": 3e-3, "amsgrad": True}]
    return torch.optim.AdamW(groups, lr=1e-2, foreach=True)


def adagrad(net: nn.Module) -> torch.optim.Optimizer:
    """Its state is made with it."""
    return torch.optim.Adagrad(net.parameters(), lr=1e-2, initial_accumulator_value=0.1)


@dataclass(frozen=True)
class Case:
    """One training, to be repeated with and without shards."""

    net: Callable[[], nn.Module] = EveryKind
    sample_shape: tuple[int, ...] = (6,)
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum
    micro_batches: int = 8
    steps: Sequence[int] = (8, 8, 8)
    clip: float | None = None
    channels_last: bool = False
    autocast: bool = False
    fewest_elements: int = 1
    """Of a block that is gathered by itself, where rows are cut."""


TRAININGS = {
    "momentum": Case(steps=(8, 1, 8, 3)),
    "fused adamw, clipped": Case(optimizer=adamw, clip=0.5),
    "adamw in a loop": Case(optimizer=adamw_in_a_loop, micro_batches=7, steps=(7, 2, 5)),
    "several groups": Case(optimizer=several_groups, clip=0.1, micro_batches=12, steps=(12, 12)),
    "adagrad": Case(optimizer=adagrad),
    "channels last": Case(ConvolutionalNet, (1, 6, 6), adamw, channels_last=True, clip=0.1),
    "bfloat16 autocast": Case(ConvolutionalNet, (1, 6, 6), autocast=True, micro_batches=5, steps=(5, 5)),
    "every kind in bfloat16, clipped": Case(optimizer=adamw, autocast=True, clip=0.5, steps=(8, 8)),
    "fewer elements than ranks": Case(Tiny, optimizer=adamw, clip=0.01),
    "a large layer": Case(Large, optimizer=adamw, clip=0.1, micro_batches=7, steps=(7, 7, 2)),
    "two types": Case(TwoTypes, optimizer=adamw, clip=0.1),
}
WAYS: tuple[Way, ...] = ("contiguous", "strided")


CARRIERS: dict[str, Callable[[dist.ProcessGroup], Exchange]] = {
    "messages": PointToPoint,
    "collectives": CollectiveExchange,
    "through host memory": PointToPoint,
}


@contextlib.contextmanager
def carried_by(carrier: str) -> Iterator[None]:
    """Carry tensors in a way that another device or backend would need."""

    through_host = carrier == "through host memory"
    with (
        mock.patch("ddp_core.reduction.parts.exchange_on", lambda group, _, tag: CARRIERS[carrier](group)),
        mock.patch("ddp_core.reduction.parts.goes_through_host", return_value=through_host),
        mock.patch("ddp_core.reduction.ordered_sum.goes_through_host", return_value=through_host),
    ):
        yield


@dataclass
class Training:
    """A model, its optimizer and reduction: alone (`way` is None), or with shards on the ranks of the process group."""

    case: Case
    way: Way | None
    node: int = 0

    def __post_init__(self) -> None:
        case = self.case
        torch.manual_seed(0)
        self.net = case.net()
        if case.channels_last:
            self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = case.optimizer(self.net)
        self.sharded = None if self.way is None else self._cut(self.way)
        self.exact = ExactReduction(self.net, case.micro_batches) if self.sharded is None else self.sharded.reduction

    def _cut(self, way: Way) -> Any:
        given = self.net, self.optimizer, self.case.micro_batches
        how: dict[str, Any] = {"process_group": dist.group.WORLD, "node": self.node}
        if way != "rows":
            return OwnsPieces(*given, shares=way, **how)
        from ddp_core.sharding.rows import OwnsRows  # FSDP takes a second to load

        return OwnsRows(*given, fewest_elements=self.case.fewest_elements, **how)

    def run(self) -> None:
        """Train all steps."""
        case = self.case
        for step, micro_batches in enumerate(case.steps):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(micro_batches, SAMPLES, *case.sample_shape, generator=generator)
            targets = torch.randint(0, CLASSES, (micro_batches, SAMPLES), generator=generator)

            def loss(index: int, step: int = step, inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
                torch.manual_seed(1000 * step + index)
                with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                    outputs = self.net(inputs[index])
                return cross_entropy(outputs.float(), targets[index], reduction="sum")

            self.exact.begin(micro_batches)
            for index in self.exact.share:
                with self.exact.micro_batch(index):
                    loss(index).backward()
            for _ in range(self.sharded.idle_passes if self.sharded is not None else 0):
                with self.sharded.idle_pass():
                    (0.0 * loss(0)).backward()
            self.exact.finish(scale=1 / (SAMPLES * micro_batches))
            if step == 1:
                self.digest()  # a look at the state changes nothing
            if case.clip is not None:
                self.exact.clip_gradients_(case.clip)
            self.optimizer.step()

    def digest(self) -> tuple[str, str]:
        """Digests of weights and buffers, and of the whole optimizer state; rank 0 has this, and weights in rows."""
        if self.sharded is None:
            return described(self.net.state_dict()), described(self.optimizer.state_dict())
        weights = self.sharded.whole_weights() if self.way == "rows" else self.net.state_dict()
        found = described(weights), described(self.sharded.whole_state())
        whole = whole_of({"model": self.sharded.own_weights(), "optimizer": self.sharded.own_state()})
        for here, together in zip(found, (whole["model"], whole["optimizer"]), strict=True):
            assert here in (described(None), described(together))
        return found

    def state_bytes(self) -> int:
        """Bytes of this rank's optimizer state, but for the counts of steps."""
        entries = [entry for state in self.optimizer.state.values() for entry in state.items()]
        return sum(value.nbytes for name, value in entries if name != "step")

    def close(self) -> None:
        """Nothing may outlive the process group."""
        self.exact.close()
        if self.sharded is not None:
            self.sharded.close()
        self.__dict__.clear()
        gc.collect()


def described(state: Any) -> str:
    """A text that differs wherever two states do: in keys and their sequence, values, dtypes, shapes and strides."""
    if isinstance(state, dict):
        return "{" + ",".join(f"{key!r}:{described(value)}" for key, value in state.items()) + "}"
    if isinstance(state, list | tuple):
        return "[" + ",".join(map(described, state)) + "]"
    if isinstance(state, Tensor):
        import hashlib

        digest = hashlib.sha256(bytes_of(state.detach())).hexdigest()
        return f"{state.dtype}{tuple(state.shape)}{state.stride()}{digest}"
    return repr(state)


def trained(case: Case, way: Way | None, node: int = 0) -> tuple[tuple[str, str], int]:
    """The digest of a training, and the bytes of this rank's optimizer state."""
    training = Training(case, way, node)
    training.run()
    net, found = training.net, (training.digest(), training.state_bytes())
    if way in WAYS:
        assert [name for name, each in net.named_parameters() if each.grad is not None] == []
    training.close()
    if way in WAYS:
        assert not any(each._post_accumulate_grad_hooks for each in net.parameters())
    return found


def everything(rank: int, world_size: int, carrier: str, names: Sequence[str]) -> dict[str, Any]:
    """Train each case with shards in both ways; return the digests and bytes of state."""
    digests: dict[tuple[str, str], tuple[str, str]] = {}
    bytes_kept: dict[str, int] = {}
    with process_group(), carried_by(carrier):
        for name, way in itertools.product(names, WAYS):
            digests[name, way], bytes_kept[name] = trained(TRAININGS[name], way)
    return {"digests": digests, "bytes": bytes_kept}


def alone(rank: int, world_size: int, names: Sequence[str]) -> dict[str, Any]:
    """The same trainings without shards, in one process: their digests, and the bytes of their state."""
    found = {name: trained(TRAININGS[name], None) for name in names}
    return {
        "digests": {name: each[0] for name, each in found.items()},
        "bytes": {n: each[1] for n, each in found.items()},
    }


def both(rank: int, world_size: int, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`everything`, and `alone` on rank 0: fewer processes to start."""
    reference = alone(rank, 1, names) if rank == 0 else {}
    return everything(rank, world_size, "messages", names), reference


class CheckpointedTwice(nn.Module):
    """One layer, used in two checkpoints, each of which runs a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = rows.requires_grad_()
        for _ in range(2):
            hidden = checkpoint(self.layer, hidden, use_reentrant=True)
        return hidden


def fail_on_one_rank(rank: int, world_size: int, where: str, way: Way) -> str:
    """Train until rank 1 fails in its third step; return the error that this rank saw."""
    dist.init_process_group("gloo")
    training = Training(Case(), way)
    exact, message = training.exact, ""
    try:
        for step in range(5):
            failing = rank == 1 and step == 2
            for index in exact.share:
                last = index == exact.share[-1]
                with exact.micro_batch(index):
                    if failing and last and where == "forward":
                        _fail()
                    loss = training.net(torch.randn(2, 6)).sum()
                    if failing and last and where == "hook":
                        training.net.first.weight.register_post_accumulate_grad_hook(_fail)
                    if failing and last and where == "exchange":
                        getattr(exact._shares, "_parts").fold = _fail  # noqa: B009
                    loss.backward()
            exact.finish()
            if failing and where == "update":
                training.optimizer.register_step_pre_hook(_fail)
            if failing and where == "gather":
                assert training.sharded is not None
                training.sharded.gather_parameters = _fail  # type: ignore[method-assign]
            training.optimizer.step()
    except RuntimeError as error:
        message = str(error)
    training.close()
    # This process leaves without an orderly end, and the other ranks must notice.
    del training, exact
    gc.collect()
    dist.destroy_process_group()
    return message


def _fail(*_: Any) -> Any:
    raise RuntimeError("failed on purpose")


def gradients_alive(rank: int, world_size: int, way: Way) -> tuple[int, int]:
    """Bytes of all gradients of a model, and the most bytes of gradients that were alive between two backwards."""
    layers, width = 24, 100
    # Two layers in each flat tensor.
    with process_group(), mock.patch("ddp_core.reduction.flat._FLAT_ELEMENTS", width * width * 3 // 2):
        torch.manual_seed(0)
        net = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())))
        made: list[tuple[StorageWeakRef, int]] = []
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda each: made.append((StorageWeakRef(each.grad.untyped_storage()), each.grad.nbytes))
            )

        def alive() -> int:
            return sum(size for memory, size in made if not memory.expired())

        most = 0
        optimizer = torch.optim.SGD(net.parameters())
        with OwnsPieces(net, optimizer, 8, process_group=dist.group.WORLD, shares=way).reduction as exact:
            exact.begin()
            for index in exact.share:
                with exact.micro_batch(index):
                    net(torch.randn(2, width)).sum().backward()
                most = max(most, alive())
            exact.finish()
            assert alive() == 0
        return sum(each.nbytes for each in net.parameters()), most
