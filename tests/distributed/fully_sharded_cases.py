"""What the worker processes of test_fully_sharded.py run; imports no test framework, so that they start fast."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy

from ddp_core.base.digests import weights_digest
from ddp_core.reduction import ExactReduction
from ddp_core.sharding.rows import OwnsRows
from tests.distributed.exact_cases import CLASSES, ConvolutionalNet, RandomNet, process_group
from tests.distributed.put_together import whole_of

SAMPLES = 3
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


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def fused_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3, fused=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def foreach_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=True, amsgrad=True)


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    groups = [{"params": parameters[1::2], "weight_decay": 0.0}, {"params": parameters[::2], "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


@dataclass(frozen=True)
class Case:
    """One training, to be repeated on every world size."""

    net: Callable[[], nn.Module] = uneven
    optimizer: Callable[[Any], torch.optim.Optimizer] = fused_adamw
    shape: tuple[int, ...] = (6,)
    micro_batches: int = 8
    steps: Sequence[int] = (8, 8, 8)
    fewest_elements: int = 1
    autocast: bool = False
    clip_norm: float | None = None


CASES = {
    "fused": Case(),
    "in a loop": Case(optimizer=adamw, micro_batches=6, steps=(6, 6, 6)),
    "foreach": Case(optimizer=foreach_adamw, micro_batches=5, steps=(5, 4, 5)),
    "momentum": Case(optimizer=sgd, micro_batches=4, steps=(4, 4, 4)),
    "fused momentum": Case(optimizer=fused_sgd),
    "two groups": Case(optimizer=two_groups),
    "one block": Case(fewest_elements=1 << 30),
    "clipped": Case(net=wide, clip_norm=0.1),
    "clipped momentum": Case(net=wide, optimizer=sgd, clip_norm=0.1),
    "incomplete batches": Case(net=Residual, shape=(1, 5, 5), steps=(8, 1, 7, 2, 8)),
    "residual network": Case(net=Residual, shape=(1, 5, 5), optimizer=sgd),
    "dropout": Case(net=ConvolutionalNet, shape=(1, 6, 6)),
    "transformer": Case(net=Transformer),
    "bfloat16 autocast": Case(net=Transformer, autocast=True, micro_batches=5, steps=(5, 5, 5)),
    "bfloat16 autocast, clipped": Case(net=Transformer, autocast=True, clip_norm=0.1, steps=(8, 8)),
    "sometimes unused": Case(net=sometimes_unused, fewest_elements=1 << 30),
    "partly frozen": Case(net=partly_frozen),
}


def batch(step: int, micro_batches: int, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(micro_batches, SAMPLES, *shape, generator=generator)
    return inputs, torch.randint(0, CLASSES, (micro_batches, SAMPLES), generator=generator)


class Training:
    """A case in the making: alone (`world_size` 0), or as a rank of the default process group."""

    def __init__(self, case: Case, world_size: int, node: int = 0) -> None:
        torch.manual_seed(0)
        self.case, self.step = case, 0
        self.net = case.net()
        self.optimizer = case.optimizer(self.net.parameters())
        self.sharded: OwnsRows | None = None
        self.reduction: Any
        if world_size:
            group = dist.group.WORLD
            assert group is not None
            self.sharded = OwnsRows(
                self.net,
                self.optimizer,
                case.micro_batches,
                process_group=group,
                fewest_elements=case.fewest_elements,
                node=node,
            )
            self.reduction = self.sharded.reduction
        else:
            self.reduction = ExactReduction(self.net, case.micro_batches)

    def train(self, steps: int | None = None) -> None:
        """Make so many more steps, or all that are left."""
        last = len(self.case.steps) if steps is None else self.step + steps
        while self.step < last:
            micro_batches = self.case.steps[self.step]
            inputs, targets = batch(self.step, micro_batches, self.case.shape)
            self.reduction.begin(micro_batches)
            for index in self.reduction.share:
                with self.reduction.micro_batch(index):
                    self.loss(inputs[index], targets[index], index).backward()
            for _ in range(self.sharded.idle_passes if self.sharded is not None else 0):
                with self.sharded.idle_pass():
                    (0.0 * self.loss(inputs[0], targets[0], 0)).backward()
            self.reduction.finish(scale=1 / (SAMPLES * micro_batches))
            if self.step == 1:
                self.state()  # a look at the state changes nothing
            if self.case.clip_norm is not None:
                self.reduction.clip_gradients_(self.case.clip_norm)
            self.optimizer.step()
            self.step += 1

    def loss(self, inputs: Tensor, targets: Tensor, index: int) -> Tensor:
        """The summed loss of a micro-batch."""
        torch.manual_seed(1000 * self.step + index)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case.autocast):
            outputs = self.net(inputs)
        return cross_entropy(outputs.float(), targets, reduction="sum")

    def state(self) -> dict[str, Any] | None:
        """The whole state of weights, buffers and optimizer; on rank 0."""
        if self.sharded is None:
            return {"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
        weights, state = self.sharded.whole_weights(), self.sharded.whole_state()
        own = {"model": self.sharded.own_weights(), "optimizer": self.sharded.own_state()}
        whole = None if weights is None else {"model": weights, "optimizer": state}
        from_parts = whole_of(own)
        assert whole is None or digest_of(from_parts) == digest_of(whole)
        return whole

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a whole state."""
        if self.sharded is None:
            self.net.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            self.sharded.load_weights(state["model"])
            self.sharded.load_state(state["optimizer"])

    def outputs(self, batches: int) -> list[list[float]]:
        """The outputs of an evaluation of so many batches, the same number on all ranks."""
        self.net.eval()
        with torch.no_grad():
            found = [self.net(batch(100 + number, 1, self.case.shape)[0][0]) for number in range(batches)]
        self.net.train()
        return [outputs.flatten().tolist() for outputs in found]


@contextlib.contextmanager
def training(case: Case, world_size: int, node: int = 0) -> Iterator[Training]:
    """A case in the making, all parts of which are gone at the end: nothing may outlive the process group."""
    made = Training(case, world_size, node)
    try:
        yield made
    finally:
        made.reduction.close()
        if made.sharded is not None:
            made.sharded.close()
        made.__dict__.clear()
        gc.collect()


def digest_of(state: dict[str, Any]) -> str:
    """The digests of weights, buffers and optimizer state, with the sequence of the keys and the tensors' strides."""
    tensors = {
        f"{number:06d}.{name}": torch.as_tensor(value)
        for number, entries in state["optimizer"]["state"].items()
        for name, value in entries.items()
        if value is not None
    }
    tensors |= state["model"]
    form = [(name, tensor.stride()) for name, tensor in tensors.items()]
    return f"{weights_digest(tensors)} {form} {state['optimizer']['param_groups']} {state['model']._metadata}"


def saved(state: dict[str, Any] | None) -> bytes | None:
    """A state as bytes, which can be sent to another process."""
    if state is None:
        return None
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def alone(rank: int, world_size: int, names: Sequence[str]) -> dict[str, str]:
    """The digests of these cases in one process without a process group."""
    digests = {}
    for name in names:
        with training(CASES[name], 0) as made:
            made.train()
            digests[name] = digest_of(made.state() or {})
    return digests


def everything(rank: int, world_size: int, names: Sequence[str]) -> dict[str, str]:
    """The digests of these cases on this rank (rank 0 has them)."""
    digests = {}
    with process_group():
        for name in names:
            with training(CASES[name], world_size) as made:
                made.train()
                if (state := made.state()) is not None:
                    digests[name] = digest_of(state)
    return digests


def everything_before_2_13(rank: int, world_size: int, names: Sequence[str]) -> dict[str, str]:
    """As `everything`, on a torch that has no name for zeros in the place of gradients that are missing."""
    if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        del FSDPModule.set_reduce_scatter_unused_params
    return everything(rank, world_size, names)


def go_on(rank: int, world_size: int, name: str, before: bytes | None, steps: int | None) -> dict[str, Any]:
    """Go on from a saved state for so many steps, or to the end; without shards where this rank is the only one."""
    with process_group(), training(CASES[name], world_size if world_size > 1 else 0) as made:
        if before is not None:
            made.load(torch.load(io.BytesIO(before)))
            made.step = 2
        made.train(steps)
        evaluated = made.outputs(2)
        state = made.state()
        return {"state": saved(state), "digest": digest_of(state) if state else None, "outputs": evaluated}
