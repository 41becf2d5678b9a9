"""Exchanges by operations that several ranks enter together: what NCCL does best.

Both are proved bit for bit over gloo, where they are slower than single messages. Neither has run on NCCL with two or
more devices yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Collected


class CollectiveExchange:
    """Carries tensors between all ranks of a group by `all_to_all_single` and `all_gather_into_tensor`."""

    one_round_bytes = -1  # all_to_all_single sends every rank another part.

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.world_size = group.rank(), group.size()

    def collect(self, own: Sequence[Tensor], like: Tensor, counts: Sequence[int], cuts: Sequence[slice]) -> Collected:
        """See `Exchange.collect`."""
        sizes = [cut.stop - cut.start for cut in cuts]
        size = sizes[self.rank]
        # The parts for one member lie together, so that they travel as one.
        outbox = torch.cat([flat[cut] for cut in cuts for flat in own]) if own else like.new_empty(0)
        inbox = like.new_empty(sum(counts) * size)
        dist.all_to_all_single(
            inbox,
            outbox,
            [count * size for count in counts],
            [len(own) * part for part in sizes],
            group=self._group,
        )
        received = torch.split(inbox, size) if size else [inbox] * sum(counts)
        return Collected([(tensor, None) for tensor in received])

    def gather(self, flats: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
        """See `Gathers.gather`. All parts of a flat tensor travel as large as the largest."""
        for flat, cuts in flats:
            sizes = [cut.stop - cut.start for cut in cuts]
            whole = flat.new_empty((self.world_size, max(sizes)))
            mine = whole[self.rank]
            mine[: sizes[self.rank]] = flat[cuts[self.rank]]
            dist.all_gather_into_tensor(whole.view(-1), mine, group=self._group)
            for cut, size, part in zip(cuts, sizes, whole, strict=True):
                flat[cut] = part[:size]


class BatchedMessages:
    """Carries tensors between some ranks of a group, all messages of a round in one batch: NCCL runs it as one kernel.

    All ranks of the group must have taken part in a collective before.
    """

    one_round_bytes = -1  # Between GPUs, bytes cost more than rounds.

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int]) -> None:
        self._group, self._members = group, members
        self.rank, self.world_size = members.index(group.rank()), len(members)

    def collect(self, own: Sequence[Tensor], like: Tensor, counts: Sequence[int], cuts: Sequence[slice]) -> Collected:
        """See `Exchange.collect`."""
        size = cuts[self.rank].stop - cuts[self.rank].start
        received = [
            [flat[cuts[self.rank]] for flat in own]
            if peer == self.rank
            else [like.new_empty(size) for _ in range(count)]
            for peer, count in enumerate(counts)
        ]
        self._run(
            [(peer, flat[cut]) for peer, cut in enumerate(cuts) for flat in own],
            [(peer, tensor) for peer, tensors in enumerate(received) for tensor in tensors],
        )
        return Collected([(tensor, None) for tensors in received for tensor in tensors])

    def gather(self, flats: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
        """See `Gathers.gather`."""
        for flat, cuts in flats:
            parts = [flat[cut] for cut in cuts]
            self._run([(peer, parts[self.rank]) for peer in range(len(cuts))], enumerate(parts))

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
