"""Strided shares where each rank needs the gradients of its own part alone: no gradient outlives its backward.

Rank r of W computes the micro-batches r, r + W, r + 2W, … In every backward each parcel of gradients is sent as soon as
it is complete, part r of it to rank r, in the background; then its gradients are freed. The W arrivals are neighbouring
leaves of the canonical tree, so their owner adds them up and pushes the sums onto a binary counter (`strided`): the
same additions as on one process, in N/W * (log2(M) + 1) elements at most. A rank sends M / W halves of an all-reduce in
a step, where contiguous shares send one.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.reduction.communication import Channel, Transfer, in_last_phase
from ddp_core.reduction.flat import Gradients
from ddp_core.reduction.strided import LeafSum, RoundSum

from .owned import Owned
from .parcels import Parcel, PartShares


class Rounds(PartShares[Parcel]):
    """How an ExactReduction deals micro-batches to ranks and brings the gradients of `parcels` together.

    At most `under_way` parcels are on their way at a time, and backward waits for more: a slow network must not pile up
    gradients. Where a forward or backward exchanges parameters (`in_pass` is entered around each), every rank must run
    the same number of them: where the last round of a step has fewer micro-batches than ranks, the other ranks run an
    `idle_pass`.
    """

    def __init__(
        self,
        parcels: Sequence[Parcel],
        owned: Sequence[Owned],
        gradients: Gradients,
        channel: Channel,
        weights_to_compare: dist.ProcessGroup | None,
        under_way: int,
        in_pass: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        super().__init__(parcels, owned, gradients, channel, weights_to_compare)
        self._under_way_at_most, self._in_pass = under_way, in_pass
        self._sums: list[RoundSum]
        self._notes: LeafSum | None
        """Sums the batch-norm statistics, and for each parameter how many micro-batches have used it."""
        self._used: list[list[bool]]
        self._counts: bool
        self._leaves = 0
        self._rounds = 0
        self._under_way: collections.deque[torch.futures.Future[Tensor]] = collections.deque()

    def share(self, micro_batches: int) -> range:
        return range(self.channel.by_parts.rank, micro_batches, self.channel.by_parts.world_size)

    def begin(self, micro_batches: int) -> None:
        self._wait_for_all_but(0)
        self._leaves, self._rounds, self._notes = micro_batches, 0, None
        self._sums = [
            RoundSum(self.channel.by_parts, each.elements, each.like, micro_batches, each.cuts)
            for each in self._parcels
        ]

    @property
    def idle_passes(self) -> int:
        """How many passes this rank has to run in this step after those of its micro-batches: one or none."""
        return 0 if self._in_pass is None else self._idle_rounds

    def backward(self, index: int) -> AbstractContextManager[None]:
        """Run the backward of micro-batch `index` inside, and the forward inside or, without `in_pass`, before."""
        return self._one_pass(counts=True)

    def idle_pass(self) -> AbstractContextManager[None]:
        """Run forward and backward of any micro-batch inside, after this rank's own; its gradients do not count."""
        return self._one_pass(counts=False)

    def push(self, statistics: Tensor) -> None:
        used = [float(is_used) for of_parcel in self._used for is_used in of_parcel]
        self._push_notes([statistics, torch.tensor(used, device=self.channel.device)])

    def finish(self, statistics: Tensor) -> None:
        """Set the `.grad` of what this rank owns, and `statistics`, to the sum over all micro-batches.

        Raises RuntimeError where an idle pass is missing, in which the other ranks wait for this one.
        """
        self.gradients.refuse_foreign()
        if self.idle_passes:
            raise RuntimeError("this rank has not run the step's idle pass, in which the other ranks wait for it")
        if self._idle_rounds:
            with self._one_pass(counts=False):
                pass
        if self._rounds > len(self.share(self._leaves)):
            count = sum(parcel.count for parcel in self._parcels)
            self._push_notes([statistics, torch.empty(count, device=self.channel.device)], counts=False)
        totals = [
            self.channel.submit(in_last_phase(total.own_total), parcel.like)
            for parcel, total in zip(self._parcels, self._sums, strict=True)
        ]
        assert self._notes is not None
        summed_statistics, counts = self._notes.totals()
        self._wait_for_all_but(0)
        statistics.copy_(summed_statistics)
        self._give([future.wait() for future in totals], counts)
        self._sums, self._notes = [], None

    @property
    def _idle_rounds(self) -> int:
        rounds, own = -(-self._leaves // self.channel.by_parts.world_size), len(self.share(self._leaves))
        return rounds - max(self._rounds, own)

    @contextlib.contextmanager
    def _one_pass(self, counts: bool) -> Iterator[None]:
        self._counts, self._used = counts, [[]] * len(self._parcels)
        self._begin_pass()
        with self._opened(), (self._in_pass or nullcontext)():
            yield
        self._send_rest()
        self._rounds += 1

    def _send(self, number: int) -> None:
        """Exchange a parcel's gradients of this round, in the background; none where the pass does not count."""
        self._wait_for_all_but(self._under_way_at_most - 1)
        parcel, total, counts = self._parcels[number], self._sums[number], self._counts
        taken, self._used[number] = parcel.take()

        def push() -> Transfer:
            yield from total.push(parcel.flattened(taken) if counts else None)
            return parcel.like

        self._under_way.append(self.channel.submit(push(), parcel.like))

    def _push_notes(self, leaf: list[Tensor], counts: bool = True) -> None:
        if self._notes is None:
            self._notes = LeafSum(self.channel, leaf, self._leaves)
        self._under_way += self._notes.push(leaf if counts else None)

    def _wait_for_all_but(self, count: int) -> None:
        while len(self._under_way) > count:
            self._under_way.popleft().wait()
