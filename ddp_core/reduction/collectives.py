"""Exchanges by operations that several ranks enter together: what NCCL does best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Collected
from .plan import Arrival


class Collectives:
    """The same with `all_to_all_single` and `all_gather_into_tensor`, which NCCL carries best.

    Proved bit for bit over gloo, where it is slower than point to point. Not run on NCCL with two or more devices yet.
    """

    one_round_bytes = -1  # all_to_all_single sends every rank another part.

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world_size = group.rank(), group.size()

    def collect(self, own: Sequence[Tensor], out: Tensor, counts: Sequence[int], cuts: Sequence[slice]) -> Collected:
        """See `Exchange.collect`."""
        return _Parcels(self, own, out, counts, cuts)

    def scatter(self, flat: Tensor | None, cuts: Sequence[slice], like: Tensor, senders: int) -> Iterator[Tensor]:
        """See `Exchange.scatter`."""
        sizes = [cut.stop - cut.start for cut in cuts]
        size = sizes[self.rank]
        outbox = like.new_empty(0)
        if flat is not None:
            outbox = flat if sum(sizes) == flat.numel() else torch.cat([flat[cut] for cut in cuts])
        inbox = like.new_empty((senders, size))
        dist.all_to_all_single(
            inbox.view(-1),
            outbox,
            [size * (sender < senders) for sender in range(self.world_size)],
            [each * (flat is not None) for each in sizes],
            group=self.group,
        )
        yield from (arrival.clone() for arrival in inbox)

    def gather(self, flats: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
        """See `Exchange.gather`. All parts of a flat tensor travel as large as the largest."""
        for flat, cuts in flats:
            sizes = [cut.stop - cut.start for cut in cuts]
            whole = flat.new_empty((self.world_size, max(sizes)))
            mine = whole[self.rank]
            mine[: sizes[self.rank]] = flat[cuts[self.rank]]
            dist.all_gather_into_tensor(whole.view(-1), mine, group=self.group)
            for cut, size, part in zip(cuts, sizes, whole, strict=True):
                flat[cut] = part[:size]


class _Parcels:
    """`Collected` by collectives: one `all_to_all_single`, then one `all_gather_into_tensor`."""

    def __init__(
        self,
        exchange: Collectives,
        own: Sequence[Tensor],
        out: Tensor,
        counts: Sequence[int],
        cuts: Sequence[slice],
    ) -> None:
        self._exchange, self._out, self._cuts = exchange, out, cuts
        sizes = [cut.stop - cut.start for cut in cuts]
        size = sizes[exchange.rank]
        # The parts for one member lie together, so that they travel as one.
        outbox = torch.cat([flat[cut] for cut in cuts for flat in own]) if own else out.new_empty(0)
        inbox = out.new_empty(sum(counts) * size)
        dist.all_to_all_single(
            inbox,
            outbox,
            [count * size for count in counts],
            [len(own) * part for part in sizes],
            group=exchange.group,
        )
        arrivals = torch.split(inbox, size) if size else [inbox] * sum(counts)
        self.arrivals: list[Arrival] = [(tensor, None) for tensor in arrivals]
        self.mine = out[cuts[exchange.rank]]

    def sent(self) -> None:
        """Nothing to do: what is sent has been copied."""

    def expect(self) -> None:
        """Nothing to do."""

    def spread(self) -> None:
        """See `Collected.spread`."""
        self._exchange.gather([(self._out, self._cuts)])

    def end(self) -> None:
        """Nothing to do: `spread` waits."""


class Batches:
    """Sends and receives between some ranks of a group, a whole exchange in one batch: NCCL runs it as one kernel.

    Proved bit for bit over gloo. Not run on NCCL with two or more devices yet. All ranks of the group must have taken
    part in a collective before.
    """

    one_round_bytes = -1  # Between GPUs, bytes cost more than rounds.

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int]) -> None:
        self._group, self._members = group, members
        self.rank, self.world_size = members.index(group.rank()), len(members)

    def collect(self, own: Sequence[Tensor], out: Tensor, counts: Sequence[int], cuts: Sequence[slice]) -> Collected:
        """See `Exchange.collect`."""
        return _Batch(self, own, out, counts, cuts)

    def run(self, sends: Iterable[tuple[int, Tensor]], receives: Iterable[tuple[int, Tensor]]) -> None:
        """Exchange tensors with other members, and wait; empty ones are left out."""
        operations = [
            dist.P2POp(operation, tensor, group=self._group, group_peer=self._members[peer])
            for operation, pairs in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in pairs
            if peer != self.rank and tensor.numel()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()


class _Batch:
    """`Collected` by two batches of messages."""

    def __init__(
        self,
        exchange: Batches,
        own: Sequence[Tensor],
        out: Tensor,
        counts: Sequence[int],
        cuts: Sequence[slice],
    ) -> None:
        self._exchange, self._out, self._cuts = exchange, out, cuts
        cut = cuts[exchange.rank]
        self.mine = out[cut]
        received = [
            [flat[cut] for flat in own]
            if peer == exchange.rank
            else [torch.empty_like(self.mine) for _ in range(count)]
            for peer, count in enumerate(counts)
        ]
        exchange.run(
            [(peer, flat[part]) for peer, part in enumerate(cuts) for flat in own],
            [(peer, tensor) for peer, tensors in enumerate(received) for tensor in tensors],
        )
        self.arrivals: list[Arrival] = [(tensor, None) for tensors in received for tensor in tensors]

    def sent(self) -> None:
        """Nothing to do: a batch waits."""

    def expect(self) -> None:
        """Nothing to do."""

    def spread(self) -> None:
        """See `Collected.spread`."""
        self._exchange.run(
            [(peer, self.mine) for peer in range(len(self._cuts))],
            [(peer, self._out[cut]) for peer, cut in enumerate(self._cuts)],
        )

    def end(self) -> None:
        """Nothing to do: `spread` waits."""
