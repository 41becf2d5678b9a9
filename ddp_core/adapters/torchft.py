"""Exact steps for torchft's Manager: one global batch and the same bits, whatever the number of replicas.

torchft averages what the replicas of a step's quorum have computed: where one is lost, batches are smaller from then
on, and sums are rounded in another way. Here a step always has all of its micro-batches. The replicas of the quorum
share them, add up their gradients in the canonical tree, over the manager's own process group, and commit as torchft
wants it. A replica that comes back gets its state from torchft.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.base.digests import fast_digest
from ddp_core.base.errors import UserError
from ddp_core.base.seeds import MicroBatchSeed
from ddp_core.reduction import ExactReduction, gradient_norm
from ddp_core.reduction.communication import Channel
from ddp_core.reduction.contiguous import ContiguousShares
from ddp_core.reduction.exchange import PointToPoint
from ddp_core.reduction.flat import Gradients
from ddp_core.reduction.ordered_sum import sum_parts
from ddp_core.reduction.parts import PartsInOneLevel
from ddp_core.reduction.tree import plan_for

from . import imports_of
from .micro_steps import is_due

with imports_of("torchft", "torchft", "torchft"):
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

__all__ = ["ExactSteps"]


class ExactSteps:
    """`ExactSteps(manager, group, module, micro_batches=12)`: 12 micro-batches make a step, on any number of replicas.

    A step, which is done again where `finish` returns False:

        for index in steps.begin():                  # asks for a quorum; the micro-batches of this replica
            x, y = samples of micro-batch `index` of step `steps.step`
            with steps.micro_batch(index):
                mean_loss(module(x), y).backward()
        if steps.finish(scale=1 / 12):               # every `grad` is the sum times scale
            optimizer.step()

    `group` is the process group that the manager was made with, and `module` the model on the CPU, without
    DistributedDataParallel. The manager's `load_state_dict` must restore module, optimizer and what else an update
    changes. Generators are seeded by (seed, step, micro-batch) before each forward, and by (seed, step) for the update.

    Raises UserError for a manager whose replicas do not all take part in each step, for another process group than
    torchft's gloo, and, on all replicas, where they have other micro-batches, parameters, threads or torch, or, looked
    at before steps 1, 2, 4, 8 …, other weights.
    """

    def __init__(self, manager: Manager, group: Any, module: nn.Module, micro_batches: int, seed: int = 0) -> None:
        if not isinstance(group, ProcessGroupGloo):
            raise UserError(
                f"{type(group).__name__}: exact steps are for torchft's ProcessGroupGloo. Where a replica is lost, "
                "NCCL may end the sums of another one without their parts, and that one would commit them"
            )
        self._manager, self._module, self._group = manager, module, group
        self._shares = _Shares(Gradients(module.named_parameters()), micro_batches)
        self._exact = ExactReduction(module, micro_batches, shares=self._shares)
        self._seed = MicroBatchSeed(seed, torch.device("cpu"), at_once=True)
        self._before: list[Tensor] = []

    @property
    def step(self) -> int:
        """Steps that are done: the number of the one at hand, once `begin` was called."""
        return int(self._manager.current_step())

    def begin(self) -> range:
        """Ask for the quorum of a step, with the newest state; returns the micro-batches that this replica computes."""
        self._manager.start_quorum()
        if self._manager.errored() is not None:
            return range(0)  # the group could not be made; nobody commits this step
        number, count = self._manager.participating_rank(), self._manager.num_participants()
        if number is None or count != self._group.size() or not self._manager.is_participating():
            raise UserError(
                f"{count} of {self._group.size()} replicas would take part in this step: make the Manager with "
                "use_async_quorum=False and WorldSizeMode.DYNAMIC, so that each of them does"
            )
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        weights = fast_digest(named) if is_due(self.step) else b""
        # torchft's own group says of each replica that it is rank 0.
        send, receive = self._group.send, self._group.recv
        replicas = SimpleNamespace(rank=lambda: number, size=lambda: count, send=send, recv=receive)
        self._shares.meet(replicas, weights)
        self._before = [buffer.clone() for buffer in self._module.buffers()]
        self._exact.begin()
        return self._exact.share

    @contextmanager
    def micro_batch(self, index: int) -> Iterator[None]:
        """Run forward and backward of this micro-batch inside."""
        with self._exact.micro_batch(index):
            self._seed(self.step, index)
            yield

    def finish(self, scale: float = 1.0) -> bool:
        """Add up over the replicas; returns whether the optimizer may make its update.

        Where it may not, the module is as before the step. Raises RuntimeError where micro-batches are missing.
        """
        step = self.step
        if self._manager.errored() is None:
            try:
                self._exact.finish(scale)
            except _ReplicaLost as lost:
                self._manager.report_error(lost)
        if not self._manager.should_commit():
            with torch.no_grad():
                for buffer, before in zip(self._module.buffers(), self._before, strict=True):
                    buffer.copy_(before)
            return False
        self._seed.update(step)
        return True


class _ReplicaLost(Exception):
    """A message to or from another replica has failed."""


class _Messages(Channel):
    """Carries gradients between the replicas of the step's quorum."""

    def __init__(self, facts: bytes) -> None:
        super().__init__(None, torch.device("cpu"), None)
        self._facts, self._weights = facts, b""
        self._exchange: PointToPoint | None = None

    def meet(self, replicas: Any, weights: bytes) -> None:
        """Send between these replicas from now on."""
        self._exchange, self._weights = PointToPoint(replicas, range(replicas.size())), weights

    @contextmanager
    def _telling(self) -> Iterator[PointToPoint]:
        assert self._exchange is not None
        try:
            with torch.no_grad():
                yield self._exchange
        except RuntimeError as error:
            raise _ReplicaLost(str(error)) from error

    def sum(self, own: Sequence[Tensor], out: Tensor, micro_batches: int) -> None:
        """Sum flat tensors over the replicas, as OrderedSum does."""
        with self._telling() as exchange:
            for _ in sum_parts(PartsInOneLevel(exchange), own, out, plan_for(micro_batches, exchange.world_size)):
                pass

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """The largest of all replicas, for each number. Raises UserError where these do not fit together."""
        for what, digest in (("micro-batches, parameters, threads or torch", self._facts), ("weights", self._weights)):
            rows = self._everyones(list(hashlib.sha256(digest).digest()))
            other = next((number for number, row in enumerate(rows) if row != rows[0]), None)
            if other is not None:
                raise UserError(f"replica {other} of {len(rows)} has other {what} than replica 0")
        return [max(column) for column in zip(*self._everyones(list(map(int, numbers))), strict=True)]

    def _everyones(self, row: list[int]) -> list[list[int]]:
        """The rows of all replicas, as long as this one."""
        with self._telling() as exchange:
            size = len(row)
            table = torch.zeros(exchange.world_size * size, dtype=torch.uint8)
            cuts = [slice(number * size, (number + 1) * size) for number in range(exchange.world_size)]
            table[cuts[exchange.rank]] = torch.tensor(row, dtype=torch.uint8)
            exchange.gather([(table, cuts)])
        return [table[cut].tolist() for cut in cuts]


class _Shares(ContiguousShares):
    """Contiguous shares whose number may change before each step."""

    weights_to_compare: dist.ProcessGroup | None = None

    def __init__(self, gradients: Gradients, micro_batches: int) -> None:
        named = zip(gradients.names, gradients.parameters, strict=True)
        shapes = [(name, each.shape, each.dtype) for name, each in named]
        facts = (torch.__version__, torch.get_num_threads(), micro_batches, shapes)
        self.gradients = gradients
        self.reduced: Sequence[nn.Parameter] = gradients.parameters
        self._messages = _Messages(repr(facts).encode())
        self.channel: Channel = self._messages
        super().__init__(None, gradients, self.channel)

    def meet(self, replicas: Any, weights: bytes) -> None:
        """Share between these replicas from now on."""
        self._rank, self._world_size = replicas.rank(), replicas.size()
        self._messages.meet(replicas, weights)

    def norm(self) -> Tensor:
        """The norm of the whole gradient."""
        return gradient_norm(self.reduced)
