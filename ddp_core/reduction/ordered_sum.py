"""The sum over all ranks in the order of the canonical tree, at the volume of a ring all-reduce.

In one level (`one_level`):

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

from .backends import connect, exchange_among, exchange_on, goes_through_host
from .exchange import Exchange, cut, wait_for
from .host_memory import like_on_host, on_host
from .one_level import Plan, plan_for, sum_in_one_level


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
                connect(exchange, device)
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
