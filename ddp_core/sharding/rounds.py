"""Strided shares of a fully sharded model: the gradients of W micro-batches at a time, added up by those who own them.

Rank r of W computes the micro-batches r, r + W, r + 2W, … In every backward, `fully_shard` lays the gradients of a
block end to end, cut in W parts, and calls its reduce-scatter. Here that call sends part r to rank r in the background,
while backward goes on. The W arrivals are neighbouring leaves of the canonical tree, so their owner pushes them onto a
binary counter: the same additions as on one process, in N/W * (log2(M) + 1) elements at most.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ddp_core.reduction.communication import Channel, in_one_phase
from ddp_core.reduction.exchange import exchange_on
from ddp_core.reduction.flat import Gradients, scale_gradients_
from ddp_core.reduction.leaf_sum import LeafSum
from ddp_core.reduction.messages import PointToPoint

from .blocks import refusing_bypasses
from .load import Load, Unread
from .row_norm import norm_of_rows
from .rows import Rows

_UNDER_WAY = 2
"""So many flat tensors are on their way at a time: a slow network must not pile up gradients."""


class Rounds:
    """How an ExactReduction deals micro-batches to ranks and brings their gradients together.

    `parts` are the modules of fully_shard, `rows` this rank's rows by the id of their sharded parameter. Every rank
    must run the same number of passes, since each pass gathers the parameters. So where the last round of a step has
    fewer micro-batches than ranks, the other ranks run an `idle_pass`.
    """

    def __init__(
        self, parts: Sequence[FSDPModule], rows: Mapping[int, Rows], group: dist.ProcessGroup, channel: Channel
    ) -> None:
        self.channel = channel
        self.gradients = _GradientsOfRows(list(rows.values()))
        self._rank, self._world_size = group.rank(), group.size()
        # One rank alone sends nothing, and its channel has no group.
        self._exchange = PointToPoint(group) if channel.group is None else exchange_on(channel.group, channel.device)
        # All ranks send in this sequence, that of a usual backward, whichever gradients are there first.
        unread = Unread()
        self._loads = [Load(part, rows, self._exchange, self._send, unread) for part in reversed(parts)]
        self._others: LeafSum | None = None
        """Sums the batch-norm statistics, and for each parameter how many micro-batches have used it."""
        self._leaves = self._rounds = self._sent = 0
        self._counts = True
        self._under_way: deque[torch.futures.Future[Tensor]] = deque()

    def share(self, micro_batches: int) -> range:
        """The micro-batches of a step that this rank computes, in order."""
        return range(self._rank, micro_batches, self._world_size)

    def begin(self, micro_batches: int) -> None:
        """Start a step."""
        self._wait()
        self._leaves, self._rounds, self._others = micro_batches, 0, None
        for load in self._loads:
            load.begin(micro_batches)

    @property
    def idle_passes(self) -> int:
        """How many passes this rank has to run in this step after those of its micro-batches: one or none."""
        rounds, own = -(-self._leaves // self._world_size), len(self.share(self._leaves))
        return rounds - max(self._rounds, own)

    @contextlib.contextmanager
    def backward(self, index: int) -> Iterator[None]:
        """Run forward and backward of micro-batch `index` inside."""
        with self._one_pass(counts=True):
            yield

    @contextlib.contextmanager
    def idle_pass(self) -> Iterator[None]:
        """Run forward and backward of any micro-batch inside, after this rank's own; its gradients do not count."""
        with self._one_pass(counts=False):
            yield

    def push(self, statistics: Tensor) -> None:
        """Take the batch-norm statistics of the micro-batch that was run."""
        used = [float(position in load.present) for load in self._loads for position in range(len(load.rows))]
        self._push_others([statistics, torch.tensor(used, device=self.channel.device)])

    def finish(self, statistics: Tensor, scale: float) -> None:
        """Set every `.grad` to the sum over all micro-batches times `scale`, and `statistics` to theirs.

        Raises RuntimeError where an idle pass is missing, in which the other ranks wait for this one.
        """
        if self.idle_passes:
            raise RuntimeError("this rank has not run the step's idle pass, in which the other ranks wait for it")
        if self._rounds > len(self.share(self._leaves)):
            parameters = sum(len(load.rows) for load in self._loads)
            self._push_others([statistics, torch.empty(parameters, device=self.channel.device)], counts=False)
        self._wait()
        assert self._others is not None
        sums, counts = self._others.totals()
        statistics.copy_(sums)
        used = iter(counts.tolist())
        for load in self._loads:
            for row, part in zip(load.rows, load.total(), strict=True):
                row.tensor.grad = row.filled(part) if next(used) else None
        scale_gradients_(self.gradients.parameters, scale)

    def norm(self) -> Tensor:
        """The norm of the whole gradient, as on one process; a collective."""
        return norm_of_rows(self.gradients.rows, self.channel, self._world_size)

    def close(self) -> None:
        """Do nothing: who made the channel closes it."""

    @contextlib.contextmanager
    def _one_pass(self, counts: bool) -> Iterator[None]:
        self._counts, self._sent = counts, 0
        for load in self._loads:
            load.open()
        try:
            with refusing_bypasses():
                yield
        finally:
            for load in self._loads:
                load.close()
        for load in self._loads:
            load.complete()
        self._send()
        self._rounds += 1

    def _send(self) -> None:
        """Start to send what is ready, up to the first load that is not."""
        while self._sent < len(self._loads) and self._loads[self._sent].ready:
            load = self._loads[self._sent]
            self._sent += 1
            while len(self._under_way) >= _UNDER_WAY:
                self._under_way.popleft().wait()
            job = in_one_phase(functools.partial(load.push, load.take(self._counts)))
            self._under_way.append(self.channel.submit(job, load.like))

    def _push_others(self, leaf: list[Tensor], counts: bool = True) -> None:
        if self._others is None:
            self._others = LeafSum(self._exchange, self.channel, leaf, self._leaves)
        self._under_way += self._others.push(leaf if counts else None)

    def _wait(self) -> None:
        while self._under_way:
            self._under_way.popleft().wait()


class _GradientsOfRows(Gradients):
    """The gradients of this rank's rows: they are set at the end of a step only."""

    def __init__(self, rows: Sequence[Rows]) -> None:
        self.rows = [row for row in rows if row.tensor.requires_grad]
        self.names = [row.name for row in self.rows]
        self.parameters = [row.tensor for row in self.rows]
