"""Sums of which each rank gets a part of its own, and the way back: all ranks' parts for every rank.

Where all ranks need the whole sum, both ways follow each other (`ordered_sum`). Where each rank owns a part of the
parameters, it needs its part of a sum alone. Where ranks exchange after every backward (`strided`), each keeps its
part of the partial sums. In one level every rank sends each other its part. The ranks of a node share its link, so that
p of W ranks send p * (W - p) / W * N elements out of their node for each of their subtrees. In two levels
(n - 1) / n * N leave each of n nodes, as with a ring, where the node's subtrees add up to one. With p ranks on every
node, a rank then sends p + n - 2 messages, not W - 1:

1. For every rank of another node, the rank with its position on this node is its *deputy*, and adds up what this node
   can add alone of that rank's part. Every rank sends its neighbours the parts of those whose deputies they are.
2. Every deputy sends these sums to the ranks that they are for, its *lane*, which add up what comes from all nodes.

The way back is the same in reverse: a rank sends its part to its deputy on each node, and that to its neighbours. So
(n - 1) / n * N leave a node there too. Between two nodes of one subtree each, ranks of a lane add up all its parts:
that sends no more, and nothing is left to send back. Nodes with unlike numbers of ranks have one level.

Reduction in levels is that of hierarchical all-reduces (Jia et al., Highly scalable deep learning training system,
2018).
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import (
    BatchedMessages,
    Exchange,
    cut,
    exchange_among,
    exchange_on,
    goes_through_host,
    like_on_host,
    on_host,
    wait_for,
)
from .tree import Plan, in_two_levels

_PIECE_ELEMENTS = 1024 * 1024
"""A piece stays in a core's cache between its arrival and its addition, and is large enough for few messages."""

Folding = Generator[None, None, list[Tensor]]
"""Sums on their way, in phases as those of an OrderedSum."""


def parts_on(group: dist.ProcessGroup | None, groups: tuple[tuple[int, ...], ...], device: torch.device) -> Parts:
    """The parts of sums on the group (None: of one rank alone) for tensors on `device`; a collective.

    In two levels where there are `groups` of ranks that add up among themselves first, as those of an OrderedSum.
    """
    if group is None:
        return PartsInOneLevel(BatchedMessages(None, [0]))  # which sends nothing, as there is nobody else
    exchange = exchange_on(group, device)
    parts = PartsInOneLevel(exchange)
    if _are_alike(groups):
        parts = PartsInTwoLevels(exchange, group, groups, device)
    return ThroughHost(parts) if goes_through_host(group, device) else parts


class PartsInOneLevel:
    """Parts of sums where every rank exchanges with every other.

    What follows are collectives, called phase by phase in one sequence on all ranks.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.rank, self.world_size = exchange.rank, exchange.world_size

    def cuts(self, elements: int, dtype: torch.dtype, rounds: int) -> Sequence[slice]:
        """Each rank's part of flat tensors, of which a rank sends so many: about equal ones.

        All the same, of all elements, where it costs no more that every rank sums all: nothing has to be gathered then.
        """
        others = self.world_size - 1
        # Whole tensors are (W-1) * N elements each in place of (W-1)/W * N, and save the (W-1)/W * N of gathering.
        extra = others / self.world_size * (rounds * others - 1) * elements * dtype.itemsize
        if extra <= self._exchange.one_round_bytes:
            return [slice(0, elements)] * self.world_size
        return cut(elements, self.world_size, dtype)

    def fold(
        self, own: Sequence[Tensor], like: Tensor, plan: Plan, cuts: Sequence[slice], out: Tensor | None = None
    ) -> Folding:
        """Sum the ranks' flat subtrees `own`, each rank its own part (`cuts`, one for each); return this rank's sums.

        They are those of `plan.rest`, and belong to the caller: the first is made in `out` if that is given, which may
        be a part of a tensor of `own`. `own` is overwritten. `like` shows dtype and device. The second phase waits;
        in the last one, in which all gathering is, nothing is done. Raises RuntimeError when a peer is gone or silent
        for the group's timeout.
        """
        out = like.new_empty(_size(cuts[self.rank])) if out is None else out
        counts = [len(spans) for spans in plan.spans]
        places, wanted = [slice(0, out.numel())], [cuts]
        if are_whole(cuts):
            # One piece is added up while the next ones arrive.
            places = cut(out.numel(), -(-out.numel() // _PIECE_ELEMENTS), out.dtype)
            wanted = [[place] * self.world_size for place in places]
        on_their_way = [self._exchange.collect(own, like, counts, each) for each in wanted]
        yield
        sums = [out, *(torch.empty_like(out) for _ in plan.rest[1:])]
        for place, collected in zip(places, on_their_way, strict=True):
            # Once: gloo would wait for a second message. First, since what is added to may also be sent.
            wait_for(collected.sent)
            plan.add_(collected.arrivals, [each[place] for each in sums])
            collected.end()
        yield
        return sums

    def gather(self, flats: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
        """Bring all ranks' parts of flat tensors to every rank, as PointToPoint does it."""
        self._exchange.gather(flats)


class PartsInTwoLevels(PartsInOneLevel):
    """Parts of sums where ranks of a node add up before nodes exchange; small and whole tensors have one level."""

    def __init__(
        self, exchange: Exchange, group: dist.ProcessGroup, nodes: tuple[tuple[int, ...], ...], device: torch.device
    ) -> None:
        super().__init__(exchange)
        self._nodes = nodes
        self._here = next(node for node, members in enumerate(nodes) if self.rank in members)
        self._order = order_of(nodes, self.world_size)
        self._lanes = list(zip(*nodes, strict=True))
        """The ranks with one position on their nodes: each other's deputies."""
        self._place = nodes[self._here].index(self.rank)
        # The tags 0 and 1 belong to the exchange between all ranks.
        self._node = exchange_among(group, device, nodes[self._here], tag=2)
        self._lane = PartsInOneLevel(exchange_among(group, device, self._lanes[self._place], tag=4))

    def cuts(self, elements: int, dtype: torch.dtype, rounds: int) -> Sequence[slice]:
        nodes, out = len(self._nodes), len(self._lanes) * (self.world_size - len(self._lanes))
        # What leaves a node in so many rounds, and in those and once more.
        extra = (rounds * out - (rounds + 1) * (nodes - 1) / nodes) * elements * dtype.itemsize
        if extra <= self._exchange.one_round_bytes:
            return [slice(0, elements)] * self.world_size
        found: dict[int, slice] = {}
        for lane, chunk in zip(self._lanes, cut(elements, len(self._lanes), dtype), strict=True):
            for rank, part in zip(lane, self._lane.cuts(_size(chunk), dtype, rounds), strict=True):
                found[rank] = slice(chunk.start + part.start, chunk.start + part.stop)
        return [found[rank] for rank in range(self.world_size)]

    def fold(
        self, own: Sequence[Tensor], like: Tensor, plan: Plan, cuts: Sequence[slice], out: Tensor | None = None
    ) -> Folding:
        # The second phase waits for the node, the third for other nodes.
        nodes = len(self._nodes)
        # What leaves a node in addition if every rank sends all others their parts of one subtree.
        extra = (len(self._lanes) - 1) * (nodes - 1) / nodes * _elements(cuts) * like.element_size()
        if are_whole(cuts) or extra <= self._exchange.one_round_bytes:
            return (yield from super().fold(own, like, plan, cuts, out))
        within_nodes, across = in_two_levels(plan, self._nodes)
        within = within_nodes[self._here]
        laid = self._laid(cuts)
        if laid != list(cuts):
            own = [torch.cat([flat[cuts[rank]] for rank in self._order]) for flat in own]
        lanes, mine = self._of_lanes(laid)
        in_node = self._node.collect(own, like, [len(spans) for spans in within.spans], lanes)
        yield
        sums = yield from self._lane.fold(within.fold_(in_node.arrivals), like, across, mine, out)
        wait_for(in_node.sent)
        in_node.end()
        return sums

    def gather(self, flats: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
        across, within, moved = [], [], []
        for flat, cuts in flats:
            whole, laid = flat, self._laid(cuts)
            if laid != list(cuts):
                whole = torch.empty_like(flat)
                whole[laid[self.rank]] = flat[cuts[self.rank]]
                moved += [(flat[to], whole[here]) for to, here in zip(cuts, laid, strict=True)]
            lanes, mine = self._of_lanes(laid)
            if not are_whole(mine):
                across.append((whole[lanes[self._place]], mine))
            within.append((whole, lanes))
        self._lane.gather(across)
        self._node.gather(within)
        for part, found in moved:
            part.copy_(found)

    def _laid(self, cuts: Sequence[slice]) -> list[slice]:
        """Where each rank's part lies, by rank, in a tensor in which the parts of one lane's ranks are neighbours."""
        found: dict[int, slice] = {}
        stop = 0
        for lane in self._lanes:
            start, is_whole = stop, are_whole([cuts[rank] for rank in lane])
            for rank in lane:
                start = start if is_whole else stop
                stop = start + _size(cuts[rank])
                found[rank] = slice(start, stop)
        return [found[rank] for rank in range(self.world_size)]

    def _of_lanes(self, laid: Sequence[slice]) -> tuple[list[slice], list[slice]]:
        """The parts of each lane together, and within those of this rank's lane, the part of each of its ranks."""
        lanes = [slice(laid[lane[0]].start, laid[lane[-1]].stop) for lane in self._lanes]
        start = lanes[self._place].start
        return lanes, [slice(laid[rank].start - start, laid[rank].stop - start) for rank in self._lanes[self._place]]


class ThroughHost:
    """Parts of sums of which copies in host memory travel; as PartsInOneLevel otherwise."""

    def __init__(self, parts: PartsInOneLevel) -> None:
        self._parts, self.rank, self.world_size = parts, parts.rank, parts.world_size
        self.cuts = parts.cuts

    def fold(
        self, own: Sequence[Tensor], like: Tensor, plan: Plan, cuts: Sequence[slice], out: Tensor | None = None
    ) -> Folding:
        out = like.new_empty(_size(cuts[self.rank])) if out is None else out
        copy = like_on_host(out)
        _, *others = yield from self._parts.fold(on_host(own), copy, plan, cuts, copy)
        return [out.copy_(copy, non_blocking=True), *(each.to(out.device) for each in others)]

    def gather(self, flats: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
        """Flat tensors travel one after the other."""
        for flat, cuts in flats:
            copy, mine = like_on_host(flat), cuts[self.rank]
            copy[mine] = on_host([flat[mine]])[0]
            self._parts.gather([(copy, cuts)])
            flat.copy_(copy, non_blocking=True)


Parts = PartsInOneLevel | ThroughHost
"""How the ranks of a group sum their parts and gather them."""


def order_of(groups: tuple[tuple[int, ...], ...], world_size: int) -> Sequence[int]:
    """All ranks in the sequence in which their parts should lie: those of one deputy are then neighbours.

    They travel as one message. `groups` are those of `parts_on`.
    """
    return list(itertools.chain.from_iterable(zip(*groups, strict=True))) if _are_alike(groups) else range(world_size)


def _are_alike(groups: tuple[tuple[int, ...], ...]) -> bool:
    """Whether there are groups, and all have as many ranks."""
    return len(set(map(len, groups))) == 1


def _size(each: slice) -> int:
    return int(each.stop - each.start)


def _elements(cuts: Sequence[slice]) -> int:
    """The number of elements of a flat tensor that is cut in this way."""
    return max(int(each.stop) for each in cuts)


def are_whole(cuts: Sequence[slice]) -> bool:
    """Whether all ranks' parts are the same, and so the whole."""
    return cuts[0] == cuts[-1] and cuts[0].start < cuts[0].stop
