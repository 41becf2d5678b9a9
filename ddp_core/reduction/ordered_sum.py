"""The sum over all ranks in the order of the canonical tree, at the volume of a ring all-reduce.

In one level:

1. Cut the N elements into W chunks; rank r sums chunk r.
2. Every rank sends chunk c of each of its subtrees to rank c: (W-1)/W * N elements where the share is one subtree.
3. Rank c adds the subtrees of chunk c in tree order.
4. Every rank sends its finished chunk to all others: (W-1)/W * N elements.

The ranks of a node share its link. If every rank exchanged chunks with every other, 2 * p * (W - p) / W * N elements
would leave a node of p of the W ranks. In two levels, 2 * (n - 1) / n * N leave each of n nodes, as with a ring, where
a node's ranks together have one subtree. With p ranks on every node, a rank sends 2 * (p + n - 2) messages, not
2 * (W - 1):

1. Cut the N elements into chunks, as many as the largest node has ranks. In each node a rank owns one chunk, or a few
   neighbouring ones in a smaller node. Every rank sends each of its subtrees' chunks to their owner in the node, which
   adds up what the node can add alone.
2. The owners of one chunk, one in each node, make its ordered sum in one level: a lane.
3. Every owner sends its finished chunks to the other ranks of its node.

Each element sees the same additions wherever chunk, bucket and node borders lie, and whichever backend carries it.
Reduction in levels is that of hierarchical all-reduces (Jia et al., Highly scalable deep learning training system,
2018).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.base.seeds import share_of

from .exchange import (
    Arrival,
    Exchange,
    cut,
    exchange_among,
    exchange_on,
    goes_through_host,
    like_on_host,
    on_host,
    wait_for,
)
from .tree import Span, are_siblings, canonical_subtrees

_PIECE_ELEMENTS = 1024 * 1024
"""A piece stays in a core's cache between its arrival and its addition, and is large enough for few messages."""


class Plan:
    """The order of additions where several members each bring subtrees of one tree over `leaves` leaves.

    A member is a rank, or a node where nodes add up in a second level.

    `spans` are each member's subtrees; `rest` are those that are left when all siblings have been added, from left to
    right in the tree: the whole of it, or what a part of the members can add up among themselves.
    """

    def __init__(self, leaves: int, spans: Sequence[Sequence[Span]]) -> None:
        self.leaves, self.spans = leaves, spans
        flat = [span for member in spans for span in member]
        # The members' subtrees, one member after the other, from left to right in the tree.
        self._order = sorted(range(len(flat)), key=flat.__getitem__)
        # For each subtree in that order: how many additions its arrival makes possible.
        self._merges: list[int] = []
        self.rest: list[Span] = []
        for position in self._order:
            self.rest.append(flat[position])
            self._merges.append(0)
            while len(self.rest) > 1 and are_siblings(self.rest[-2], self.rest[-1], leaves):
                right, left = self.rest.pop(), self.rest.pop()
                self.rest.append(Span(left.first, right.stop))
                self._merges[-1] += 1

    def add_(self, arrivals: Sequence[Arrival], out: Tensor) -> None:
        """Add up the whole tree as `fold_` does, into `out`, which may be one of the tensors."""
        (root,) = self.fold_(arrivals, out)
        if root.data_ptr() != out.data_ptr():
            out.copy_(root)

    def fold_(self, arrivals: Sequence[Arrival], out: Tensor | None = None) -> list[Tensor]:
        """Add the members' subtrees, each once its work is done; return those of `rest`. The tensors are overwritten.

        `arrivals` are the subtrees of the first member, then those of the second, and so on. The last addition is made
        into `out` if that is given.
        """
        stack: list[Tensor] = []
        additions = sum(self._merges)
        for position, merges in zip(self._order, self._merges, strict=True):
            tensor, work = arrivals[position]
            if work is not None:
                work.wait()
            stack.append(tensor)
            for _ in range(merges):
                right, left = stack.pop(), stack.pop()
                additions -= 1
                stack.append(torch.add(left, right, out=left if additions or out is None else out))
        return stack


@functools.lru_cache(maxsize=64)
def plan_for(micro_batches: int, parts: int | tuple[int, ...]) -> Plan:
    """The plan of a step in which each rank brings the subtrees of its contiguous share (`share_of`); made once."""
    shares = [share_of(micro_batches, rank, parts) for rank in range(parts if isinstance(parts, int) else len(parts))]
    return Plan(micro_batches, [canonical_subtrees(share.start, share.stop, micro_batches) for share in shares])


def sum_in_one_level(exchange: Exchange, own: Sequence[Tensor], out: Tensor, plan: Plan) -> None:
    """Sum the members' flat subtrees `own` into `out`, which may be one of them; `own` is overwritten.

    Small tensors, and all tensors between two members with one subtree each (which send no more by it), take one round:
    every member sends its subtrees to all others and adds up everything itself, one piece while the next ones arrive.
    Raises RuntimeError when a peer is gone or silent for the group's timeout.
    """
    members, elements = exchange.world_size, out.numel()
    counts = [len(spans) for spans in plan.spans]
    # A member with c subtrees sends c * (W-1) * N elements in one round, (c + 1) * (W-1)/W * N in two.
    extra_elements = (members - 1) * (max(counts) - (max(counts) + 1) / members) * elements
    if extra_elements * out.element_size() <= exchange.one_round_bytes:
        pieces = cut(elements, -(-elements // _PIECE_ELEMENTS), out.dtype)
        on_their_way = [exchange.collect(own, out, counts, [piece] * members) for piece in pieces]
        for piece, collected in zip(pieces, on_their_way, strict=True):
            wait_for(collected.sent)
            plan.add_(collected.arrivals, out[piece])
            collected.end()
    else:
        cuts = cut(elements, members, out.dtype)
        collected = exchange.collect(own, out, counts, cuts)
        plan.add_(collected.arrivals, out[cuts[exchange.rank]])
        # Others' sums arrive where own tensors may lie.
        wait_for(collected.sent)
        collected.end()
        exchange.gather([(out, cuts)])


class OrderedSum:
    """The ordered sum on one process group: chooses the exchange by backend, and one level or two by `nodes`.

    `nodes` are the group's ranks, node by node; None: in one level. `parts`: in which proportion a step is dealt to the
    ranks (see `share_of`); empty: in equal shares. Collective: every rank of `group` calls it in the same order with
    tensors of the same size and dtype. One thread only, except that phases of several sums (`phases`) may run on a
    thread each.
    """

    PHASES = 3
    """The most phases that a sum has."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        nodes: Sequence[Sequence[int]] | None = None,
        parts: tuple[int, ...] = (),
    ) -> None:
        self._group = group
        self.rank, self.world_size = (group.rank(), group.size()) if group is not None else (0, 1)
        self.parts = parts
        self.groups = groups_of(nodes or ())
        """The ranks that add up among themselves first, where that is done in two levels."""
        self._exchanges: dict[str, tuple[Exchange, TwoLevels | None]] = {}

    def __call__(self, own: Sequence[Tensor], out: Tensor, micro_batches: int) -> None:
        """Sum all ranks' subtrees over `micro_batches` leaves into `out`.

        `own` holds one flat tensor per span of `canonical_subtrees(share)`; they are overwritten, and `out` may be one.
        """
        for _ in self.phases(own, out, micro_batches):
            pass

    def phases(self, own: Sequence[Tensor], out: Tensor, micro_batches: int) -> Iterator[None]:
        """The sum, in phases that may run at the same time as other phases of the next sums.

        Every rank must run each phase of one sum before the same phase of the next.
        """
        plan = plan_for(micro_batches, self.parts or self.world_size)
        if len(own) != len(plan.spans[self.rank]):
            raise ValueError(f"rank {self.rank} owns the subtrees {plan.spans[self.rank]}, got {len(own)} tensors")
        if self._group is None or self.world_size == 1:
            plan.add_([(flat, None) for flat in own], out)
        elif out.numel() and goes_through_host(self._group, out.device):
            copy = like_on_host(out)
            yield from self._exchanged(self._group, on_host(own), copy, plan)
            out.copy_(copy, non_blocking=True)
        elif out.numel():
            yield from self._exchanged(self._group, own, out, plan)

    def _exchanged(self, group: dist.ProcessGroup, own: Sequence[Tensor], out: Tensor, plan: Plan) -> Iterator[None]:
        device = out.device
        if device.type not in self._exchanges:
            exchange, levels = exchange_on(group, device), None
            if self.groups:
                levels = TwoLevels(group, self.groups, device)
            self._exchanges[device.type] = exchange, levels
        exchange, levels = self._exchanges[device.type]
        if levels is None or levels.cost_of_one_round(out) <= exchange.one_round_bytes:
            sum_in_one_level(exchange, own, out, plan)
        else:
            yield from levels.phases(own, out, plan)


def groups_of(nodes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The ranks that add up among themselves first: the nodes, all ranks node by node; () where one level is enough."""
    return tuple(map(tuple, nodes)) if 1 < len(nodes) < sum(map(len, nodes)) else ()


class TwoLevels:
    """The sum on a process group in two levels; `nodes` are the groups of its ranks that add up first."""

    def __init__(self, group: dist.ProcessGroup, nodes: tuple[tuple[int, ...], ...], device: torch.device) -> None:
        self._nodes = nodes
        self._here = next(node for node, members in enumerate(nodes) if group.rank() in members)
        members, self._chunks = nodes[self._here], max(map(len, nodes))
        # The tags 0 and 1 belong to the exchange between all ranks.
        self._node = exchange_among(group, device, members, tag=2)
        # The chunks that each rank of this node owns: its i-th of n ranks owns those with `chunk * n // chunks == i`.
        borders = [-(-index * self._chunks // len(members)) for index in range(len(members) + 1)]
        self._owned = [range(*pair) for pair in itertools.pairwise(borders)]
        # The lanes of the chunks that this rank owns.
        self._lanes: list[Exchange] = []
        for chunk in self._owned[self._node.rank]:
            lane = [other[chunk * len(other) // self._chunks] for other in nodes]
            self._lanes.append(exchange_among(group, device, lane, tag=4))

    def cost_of_one_round(self, out: Tensor) -> float:
        """Bytes that leave a node in addition if every rank sends its whole subtree to all others."""
        nodes, world_size = len(self._nodes), sum(map(len, self._nodes))
        messages = max(len(members) * (world_size - len(members)) for members in self._nodes)
        return (messages - 2 * (nodes - 1) / nodes) * out.numel() * out.element_size()

    def phases(self, own: Sequence[Tensor], out: Tensor, plan: Plan) -> Iterator[None]:
        """See `OrderedSum.phases`."""
        within_nodes, across = in_two_levels(plan, self._nodes)
        within = within_nodes[self._here]
        chunks = cut(out.numel(), self._chunks, out.dtype)
        cuts = [slice(chunks[owned.start].start, chunks[owned.stop - 1].stop) for owned in self._owned]

        collected = self._node.collect(own, out, [len(spans) for spans in within.spans], cuts)
        subtrees = within.fold_(collected.arrivals)
        wait_for(collected.sent)
        yield

        sizes = [chunks[chunk].stop - chunks[chunk].start for chunk in self._owned[self._node.rank]]
        parts = [torch.split(subtree, sizes) for subtree in subtrees]
        own_chunks = torch.split(out[cuts[self._node.rank]], sizes)
        for position, (lane, mine) in enumerate(zip(self._lanes, own_chunks, strict=True)):
            if mine.numel():
                sum_in_one_level(lane, [part[position] for part in parts], mine, across)
        collected.end()
        yield

        self._node.gather([(out, cuts)])


@functools.lru_cache(maxsize=256)
def in_two_levels(plan: Plan, nodes: tuple[tuple[int, ...], ...]) -> tuple[list[Plan], Plan]:
    """The plan of each node, given by its ranks, and the plan across the nodes for what is left then; made once."""
    within_nodes = [Plan(plan.leaves, [plan.spans[rank] for rank in members]) for members in nodes]
    return within_nodes, Plan(plan.leaves, [node.rest for node in within_nodes])
