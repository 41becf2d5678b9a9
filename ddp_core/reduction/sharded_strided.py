"""Strided shares where each rank needs the gradients of its own pieces alone: no gradient outlives its backward.

In every backward each flat group is sent as soon as its gradients are there, and they are freed. A rank receives its
range of the W leaves of a round and pushes them onto a binary counter (`round_sum`): N/W * (log2(M) + 1) elements at
most, in place of whole gradients. It sends M / W halves of an all-reduce in a step, contiguous shares send one.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from .communication import Channel, in_one_phase
from .departures import Departures
from .exchange import exchange_on
from .flat import Gradients, record_use
from .leaf_sum import LeafSum
from .round_sum import RoundSum
from .sharded import arrived, clear_gradients, set_gradients
from .shards import Shards

_UNDER_WAY = 4
"""Backward waits while so many groups are on their way: a slow network must not pile up gradients."""


class ShardedStridedShares:
    """Sends each flat group in every backward, in the background."""

    def __init__(self, shards: Shards, gradients: Gradients, channel: Channel) -> None:
        assert channel.group is not None
        self._shards, self._gradients, self._channel = shards, gradients, channel
        self._exchange = exchange_on(channel.group, channel.device)
        self._under_way: collections.deque[torch.futures.Future[Tensor]] = collections.deque()
        self._departures = Departures(shards, self._send)

    def share(self, micro_batches: int) -> range:
        """The micro-batches of a step that this rank computes, in order."""
        return range(self._exchange.rank, micro_batches, self._exchange.world_size)

    def begin(self, micro_batches: int) -> None:
        """Start a step."""
        self._wait_for_all_but(0)
        clear_gradients(self._shards, self._exchange.rank)
        self._leaves, self._rounds = micro_batches, 0
        self._sums = [
            RoundSum(self._exchange, group.flat.numel(), group.flat, micro_batches, group.cuts)
            for group in self._shards.groups
        ]
        self._notes: LeafSum | None = None

    @contextlib.contextmanager
    def backward(self, index: int) -> Iterator[None]:
        """Run the backward of micro-batch `index` inside, and the forward inside or before."""
        self._present: list[float] | None = [0.0] * len(self._shards.parameters)
        self._departures.begin()
        try:
            yield
        finally:
            self._departures.stop()

    def push(self, statistics: Tensor) -> None:
        """Send what is left of the micro-batch that was run, and its batch-norm statistics."""
        self._departures.send_rest()
        self._end_round(statistics)

    def finish(self, statistics: Tensor, scale: float) -> None:
        """Set the `.grad` of this rank's pieces to the sum over all micro-batches times `scale`, and `statistics`."""
        self._gradients.refuse_foreign()
        while self._rounds * self._exchange.world_size < self._leaves:
            self._present = None
            self._departures.begin(watching=False)
            self._departures.send_rest()
            self._end_round(statistics)
        totals = {
            number: self._channel.submit(in_one_phase(total.own_total), group.flat)
            for number, (group, total) in enumerate(zip(self._shards.groups, self._sums, strict=True))
        }
        assert self._notes is not None
        summed_statistics, used = self._notes.totals()
        self._wait_for_all_but(0)
        statistics.copy_(summed_statistics)
        ranges = arrived(totals, scale)
        set_gradients(self._shards, self._exchange.rank, ranges, [count > 0 for count in used.tolist()])
        self._sums, self._notes = [], None

    def close(self) -> None:
        """Take the hooks away."""
        self._departures.close()

    def _send(self, number: int) -> None:
        """Exchange the round's gradients of a group, in the background; none on a rank without a micro-batch."""
        self._wait_for_all_but(_UNDER_WAY - 1)
        group, total = self._shards.groups[number], self._sums[number]
        gradients = None
        if self._present is not None:
            gradients = self._gradients.take(group.positions)
            for position, gradient in zip(group.positions, gradients, strict=True):
                self._present[position] = float(gradient is not None)

        def push() -> Tensor:
            flat = None
            if gradients is not None:
                record_use(gradients)
                flat = group.flattened(gradients)
                gradients.clear()
            total.push(flat)
            return group.flat

        self._under_way.append(self._channel.submit(in_one_phase(push), group.flat))

    def _end_round(self, statistics: Tensor) -> None:
        """Exchange the batch-norm statistics, and which parameters the micro-batch has used."""
        present = torch.zeros(len(self._shards.parameters)) if self._present is None else torch.tensor(self._present)
        leaf = [statistics, present.to(self._channel.device)]
        if self._notes is None:
            self._notes = LeafSum(self._exchange, self._channel, leaf, self._leaves)
        self._under_way += self._notes.push(None if self._present is None else leaf)
        self._rounds += 1

    def _wait_for_all_but(self, count: int) -> None:
        while len(self._under_way) > count:
            self._under_way.popleft().wait()
