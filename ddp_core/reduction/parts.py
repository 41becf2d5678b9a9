"""Sums of which each rank gets a part of its own, and the way back: all ranks' parts for every rank.

Where each rank owns a part of the parameters, it needs its part of a sum alone. Where ranks exchange after every
backward (`round_sum`), each keeps its part of the partial sums. In one level every rank sends each other its part. The
ranks of a node share its link, so that p of W ranks send p * (W - p) / W * N elements out of their node for each of
their subtrees. In two levels (n - 1) / n * N leave each of n nodes where the node's subtrees add up to one:

1. For every rank of another node, the rank with its position on this node is its *deputy*, and adds up what this node
   can add alone of that rank's part. Every rank sends its neighbours the parts of those whose deputies they are.
2. Every deputy sends these sums to the ranks that they are for, which add up what comes from all nodes.

The way back is the same in reverse: a rank sends its part to its deputy on each node, and that to its neighbours. So
(n - 1) / n * N leave a node there too. Nodes with unlike numbers of ranks, and gloo's way through host memory, have one
level.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .backends import carrier_on, exchange_on, goes_through_host
from .exchange import Arrival, Awaited, Collected, Exchange, Folding, Gathers, cut, wait_for
from .host_memory import like_on_host, on_host
from .messages import Inboxes
from .one_level import Plan
from .ordered_sum import in_two_levels


class Parts(Gathers, Protocol):
    """How the ranks of a group sum their parts and gather them; collectives, phase by phase in one sequence."""

    world_size: int

    def cuts(self, elements: int, dtype: torch.dtype, rounds: int) -> Sequence[slice]:
        """Each rank's part of flat tensors that are summed in so many rounds: about equal ones.

        All the same, of all elements, where it costs no more that every rank sums all: nothing has to be gathered then.
        """

    def fold(self, own: Sequence[Tensor], like: Tensor, plan: Plan, cuts: Sequence[slice]) -> Folding:
        """Sum the ranks' flat subtrees `own`, each rank its own part (`cuts`, one for each); return this rank's sums.

        They are those of `plan.rest`, and belong to the caller. `own` is overwritten. `like` shows dtype and device.
        Raises RuntimeError when a peer is gone or silent for the group's timeout.
        """


def parts_on(group: dist.ProcessGroup | None, groups: tuple[tuple[int, ...], ...], device: torch.device) -> Parts:
    """The parts of sums on the group (None: of one rank alone) for tensors on `device`; a collective.

    In two levels where there are `groups` of ranks that add up among themselves first, as those of an OrderedSum.
    """
    if group is None:
        return Alone()
    through_host = goes_through_host(group, device)
    in_one = PartsInOneLevel(exchange_on(group, device), through_host)
    has_levels = _are_alike(groups) and not through_host
    return PartsInTwoLevels(group, groups, device, in_one) if has_levels else in_one


class Alone:
    """`Parts` of one rank alone, which has all."""

    rank, world_size = 0, 1

    def cuts(self, elements: int, dtype: torch.dtype, rounds: int) -> Sequence[slice]:
        """See `Parts.cuts`."""
        return [slice(0, elements)]

    def fold(self, own: Sequence[Tensor], like: Tensor, plan: Plan, cuts: Sequence[slice]) -> Folding:
        """See `Parts.fold`."""
        yield from ()
        return plan.fold_([(flat, None) for flat in own])

    def gather(self, flats: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
        """Nothing to do."""


class PartsInOneLevel:
    """`Parts` where every rank exchanges with every other; `through_host`: by copies in host memory."""

    def __init__(self, exchange: Exchange, through_host: bool = False) -> None:
        self._exchange, self._through_host = exchange, through_host
        self.rank, self.world_size = exchange.rank, exchange.world_size
        self.one_round_bytes = exchange.one_round_bytes

    def cuts(self, elements: int, dtype: torch.dtype, rounds: int) -> Sequence[slice]:
        """See `Parts.cuts`."""
        # Whole subtrees are (W-1) * N elements a round in place of (W-1)/W * N, and save the (W-1)/W * N of gathering.
        extra = (rounds * (self.world_size - 1) - 1) * elements * dtype.itemsize
        if extra <= self.one_round_bytes:
            return [slice(0, elements)] * self.world_size
        return cut(elements, self.world_size, dtype)

    def fold(self, own: Sequence[Tensor], like: Tensor, plan: Plan, cuts: Sequence[slice]) -> Folding:
        """See `Parts.fold`. The second phase waits."""
        device = like.device
        if self._through_host:
            own, like = on_host(own), like.new_empty(0, device="cpu")
        collected = self._exchange.collect(own, like, [len(spans) for spans in plan.spans], cuts)
        yield
        # Once: gloo would wait for a second message. First, where what is added to is also sent.
        is_whole = are_whole(cuts)
        if is_whole:
            wait_for(collected.sent)
        sums = _folded(plan, collected.arrivals, like.new_empty(_size(cuts[self.rank])))
        if not is_whole:
            wait_for(collected.sent)
        collected.end()
        return [each.to(device) for each in sums]

    def gather(self, flats: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
        """See `Gathers.gather`. Flat tensors of a device travel one after the other."""
        if not self._through_host:
            self._exchange.gather(flats)
            return
        for flat, cuts in flats:
            copy, mine = like_on_host(flat), cuts[self.rank]
            copy[mine] = on_host([flat[mine]])[0]
            self._exchange.gather([(copy, cuts)])
            flat.copy_(copy, non_blocking=True)


class PartsInTwoLevels:
    """`Parts` where ranks of a node add up before nodes exchange; `in_one` is for small and for whole tensors."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        nodes: tuple[tuple[int, ...], ...],
        device: torch.device,
        in_one: PartsInOneLevel,
    ) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        self._in_one, self._nodes = in_one, nodes
        self._here = next(node for node, members in enumerate(nodes) if self.rank in members)
        # The tags below belong to the whole sums, which may be on their way at the same time.
        self._within, self._across = carrier_on(group, device, tag=6), carrier_on(group, device, tag=8)
        self._inboxes = Inboxes()
        members, self._order = nodes[self._here], order_of(nodes, self.world_size)
        position = members.index(self.rank)
        self._deputies = [node[position] for node in nodes]
        """This rank's deputy on each node; on its own node, the rank itself."""
        self._cared_for = dict(zip(members, zip(*nodes, strict=True), strict=True))
        """The ranks whose deputy each rank of this node is, node by node."""
        # Each starts with another neighbour, so that they do not all send to the same one first.
        self._neighbours = [*members[position + 1 :], *members[:position]]

    def cuts(self, elements: int, dtype: torch.dtype, rounds: int) -> Sequence[slice]:
        """See `Parts.cuts`."""
        nodes = len(self._nodes)
        messages = max(len(members) * (self.world_size - len(members)) for members in self._nodes)
        # What leaves a node in so many rounds, and in those and once more.
        extra = (rounds * messages - (rounds + 1) * (nodes - 1) / nodes) * elements * dtype.itemsize
        if extra <= self._in_one.one_round_bytes:
            return [slice(0, elements)] * self.world_size
        ranges = cut(elements, self.world_size, dtype)
        return [ranges[self._order.index(rank)] for rank in range(self.world_size)]

    def fold(self, own: Sequence[Tensor], like: Tensor, plan: Plan, cuts: Sequence[slice]) -> Folding:
        """See `Parts.fold`. The second phase waits for the node, the third for other nodes."""
        if are_whole(cuts) or self._cost_of_one_level(cuts, like) <= self._in_one.one_round_bytes:
            return (yield from self._in_one.fold(own, like, plan, cuts))
        within_nodes, across = in_two_levels(plan, self._nodes)
        in_node = self._send_in_node(own, like, within_nodes[self._here], cuts)
        yield
        subtrees = within_nodes[self._here].fold_(in_node.arrivals)
        between = self._send_between_nodes(subtrees, like, [len(node.rest) for node in within_nodes], cuts)
        wait_for(in_node.sent)
        yield
        sums = _folded(across, between.arrivals, like.new_empty(_size(cuts[self.rank])))
        wait_for(between.sent)
        in_node.end()
        between.end()
        return sums

    def _send_in_node(self, own: Sequence[Tensor], like: Tensor, plan: Plan, cuts: Sequence[slice]) -> Collected:
        """Start to send this rank's neighbours the parts of those ranks whose deputies they are."""
        members = self._nodes[self._here]
        counts = dict(zip(members, map(len, plan.spans), strict=True))
        ranges = {member: joined(cuts[rank] for rank in ranks) for member, ranks in self._cared_for.items()}
        mine = ranges[self.rank]
        inbox, rows = self._rows(sum(counts.values()) - counts[self.rank], sum(map(_size, mine)), like)
        expected = {member: [next(rows) for _ in range(counts[member])] for member in self._neighbours}
        sent, works = self._within.carry(
            [(member, flat[each]) for member in self._neighbours for flat in own for each in ranges[member]],
            [
                (member, part)
                for member in self._neighbours
                for row in expected[member]
                for part in row.split([*map(_size, mine)])
            ],
        )
        arriving = iter(works)
        arrivals: dict[int, list[Arrival]] = {
            member: [(row, _All([next(arriving) for _ in mine])) for row in rows_of_member]
            for member, rows_of_member in expected.items()
        }
        arrivals[self.rank] = [(_laid_together(flat, mine), None) for flat in own]
        ordered = [arrival for member in members for arrival in arrivals[member]]
        return Collected(ordered, sent, partial(self._inboxes.give_back, inbox))

    def _send_between_nodes(
        self, subtrees: Sequence[Tensor], like: Tensor, counts: Sequence[int], cuts: Sequence[slice]
    ) -> Collected:
        """Start to send the node's sums to the ranks whose deputy this rank is; `counts` are those of all nodes."""
        mine = self._cared_for[self.rank]
        parts = [dict(zip(mine, each.split([_size(cuts[rank]) for rank in mine]), strict=True)) for each in subtrees]
        inbox, rows = self._rows(sum(counts) - len(parts), _size(cuts[self.rank]), like)
        # This rank's deputy on its own node is the rank itself.
        expected = [
            (deputy, part[self.rank] if deputy == self.rank else next(rows))
            for deputy, count in zip(self._deputies, counts, strict=True)
            for part in (parts if deputy == self.rank else [{}] * count)
        ]
        sent, works = self._across.carry(
            [(rank, part[rank]) for rank in mine if rank != self.rank for part in parts],
            [(deputy, row) for deputy, row in expected if deputy != self.rank],
        )
        arriving = iter(works)
        arrivals: list[Arrival] = [(row, None if deputy == self.rank else next(arriving)) for deputy, row in expected]
        return Collected(arrivals, sent, partial(self._inboxes.give_back, inbox))

    def _rows(self, count: int, size: int, like: Tensor) -> tuple[Tensor, Iterator[Tensor]]:
        """Memory for so many flat tensors that will arrive, and these tensors."""
        inbox = self._inboxes.take(count * size, like)
        return inbox, iter(inbox[: count * size].view(count, size))

    def gather(self, flats: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
        """See `Gathers.gather`."""
        deputies = [deputy for deputy in self._deputies if deputy != self.rank]
        others = [rank for rank in self._cared_for[self.rank] if rank != self.rank]
        across = [
            self._across.carry(
                [(deputy, flat[cuts[self.rank]]) for deputy in deputies],
                [(rank, flat[cuts[rank]]) for rank in others],
                1,
            )
            for flat, cuts in flats
        ]
        works: list[Awaited | None] = []
        for (flat, cuts), (sent, arriving) in zip(flats, across, strict=True):
            wait_for(arriving)
            parts = {
                member: [flat[each] for each in joined(cuts[rank] for rank in ranks)]
                for member, ranks in self._cared_for.items()
            }
            sent_within, arriving_within = self._within.carry(
                [(member, part) for member in self._neighbours for part in parts[self.rank]],
                [(member, part) for member in self._neighbours for part in parts[member]],
                1,
            )
            works += [*sent, *sent_within, *arriving_within]
        wait_for(works)

    def _cost_of_one_level(self, cuts: Sequence[slice], like: Tensor) -> float:
        """Bytes that leave a node in addition if every rank sends all others their parts of one subtree."""
        nodes, most = len(self._nodes), max(map(len, self._nodes))
        return (most - 1) * (nodes - 1) / nodes * _elements(cuts) * like.element_size()


def order_of(groups: tuple[tuple[int, ...], ...], world_size: int) -> Sequence[int]:
    """All ranks in the sequence in which their parts should lie: those of one deputy are then neighbours.

    They travel as one message. `groups` are those of `parts_on`.
    """
    return list(itertools.chain.from_iterable(zip(*groups, strict=True))) if _are_alike(groups) else range(world_size)


def _are_alike(groups: tuple[tuple[int, ...], ...]) -> bool:
    """Whether there are groups, and all have as many ranks."""
    return len(set(map(len, groups))) == 1


class _All:
    """Several works to wait for."""

    def __init__(self, works: Sequence[Awaited | None]) -> None:
        self._works = works

    def wait(self) -> None:
        """Until all are done."""
        wait_for(self._works)


def joined(cuts: Iterable[slice]) -> list[slice]:
    """The cuts without the empty ones, and neighbours as one."""
    found: list[slice] = []
    for each in cuts:
        if each.start < each.stop:
            if found and found[-1].stop == each.start:
                found[-1] = slice(found[-1].start, each.stop)
            else:
                found.append(each)
    return found


def _laid_together(flat: Tensor, ranges: Sequence[slice]) -> Tensor:
    """These ranges of a flat tensor as one tensor; a view where that is possible."""
    if len(ranges) == 1:
        return flat[ranges[0]]
    return torch.cat([flat[:0], *(flat[each] for each in ranges)])


def _folded(plan: Plan, arrivals: Sequence[Arrival], out: Tensor) -> list[Tensor]:
    """The sums of `plan.rest`, in memory of their own: `out` and more like it."""
    return [each if each is out else each.clone() for each in plan.fold_(arrivals, out)]


def _size(each: slice) -> int:
    return int(each.stop - each.start)


def _elements(cuts: Sequence[slice]) -> int:
    """The number of elements of a flat tensor that is cut in this way."""
    return max(int(each.stop) for each in cuts)


def are_whole(cuts: Sequence[slice]) -> bool:
    """Whether all ranks' parts are the same; there are two ranks or more."""
    return cuts[0] == cuts[-1] and cuts[0].start < cuts[0].stop
