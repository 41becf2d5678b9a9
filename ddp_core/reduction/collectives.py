"""An exchange by batches of messages that several ranks enter together: what NCCL does best.

It is proved bit for bit over gloo, where it is slower than single messages. It has not run on NCCL with two or more
devices yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Arrival, Collected


@dataclass
class _Arrived:
    """`Collected` where every operation waits: all parts are here, and `send_sum` is all that is left to do."""

    arrivals: list[Arrival]
    mine: Tensor
    send_sum: Callable[[], None]

    def wait_sent(self) -> None:
        """Nothing to do."""

    def expect_sums(self) -> None:
        """Nothing to do."""

    def end(self) -> None:
        """Nothing to do."""


class BatchedMessages:
    """Carries tensors between ranks of a group, all messages of a round in one batch: NCCL runs it as one kernel.

    Where `members` are some of the ranks (None: all), all must have taken part in a collective before.
    """

    one_round_bytes = -1  # Between GPUs, bytes cost more than rounds.

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int] | None = None) -> None:
        self._group, self._members = group, range(group.size()) if members is None else members
        self.rank, self.world_size = self._members.index(group.rank()), len(self._members)

    def collect(self, own: Sequence[Tensor], out: Tensor, counts: Sequence[int], cuts: Sequence[slice]) -> Collected:
        """See `Exchange.collect`."""
        mine = out[cuts[self.rank]]
        received = [
            [flat[cuts[self.rank]] for flat in own]
            if peer == self.rank
            else [torch.empty_like(mine) for _ in range(count)]
            for peer, count in enumerate(counts)
        ]
        self._run(
            [(peer, flat[cut]) for peer, cut in enumerate(cuts) for flat in own],
            [(peer, tensor) for peer, tensors in enumerate(received) for tensor in tensors],
        )

        arrivals: list[Arrival] = [(tensor, None) for tensors in received for tensor in tensors]
        return _Arrived(arrivals, mine, send_sum=lambda: self.gather([(out, cuts)]))

    def gather(self, flats: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
        """See `Gathers.gather`."""
        self._run(
            [(peer, flat[cuts[self.rank]]) for flat, cuts in flats for peer in range(len(cuts))],
            [(peer, flat[cut]) for flat, cuts in flats for peer, cut in enumerate(cuts)],
        )

    def carry(
        self, sends: Iterable[tuple[int, Tensor]], receives: Iterable[tuple[int, Tensor]], channel: int = 0
    ) -> tuple[list[dist.Work], list[dist.Work | None]]:
        """See `Carrier.carry`. Waits, so there is nothing left to wait for; `channel` means nothing here."""
        expected = list(receives)
        self._run(sends, expected)
        return [], [None] * len(expected)

    def _run(self, sends: Iterable[tuple[int, Tensor]], receives: Iterable[tuple[int, Tensor]]) -> None:
        """Exchange tensors with other members, and wait; empty ones are left out."""
        operations = [
            dist.P2POp(operation, tensor, group=self._group, group_peer=self._members[peer])
            for operation, pairs in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in pairs
            if peer != self.rank and tensor.numel()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
