"""The ordered sum in two levels: within each node, across the nodes, and within each node again.

The ranks of a node share its link. If every rank exchanged chunks with every other, 2 * p * (W - p) / W * N elements
would leave a node of p of the W ranks. Here 2 * (n - 1) / n * N leave each of n nodes, as with a ring, where a node's
ranks together have one subtree. With p ranks on every node, a rank sends 2 * (p + n - 2) messages, not 2 * (W - 1).

1. Cut the N elements into chunks, as many as the largest node has ranks. In each node a rank owns one chunk, or a few
   neighbouring ones in a smaller node. Every rank sends each of its subtrees' chunks to their owner in the node, which
   adds up what the node can add alone.
2. The owners of one chunk, one in each node, make its ordered sum: a lane.
3. Every owner sends its finished chunks to the other ranks of its node.

Many ranks on a single node are treated as if neighbours were a node, which saves messages. Additions are those of the
tree, and so are the bits. Reduction in levels is that of hierarchical all-reduces
(Jia et al., Highly scalable deep learning training system, 2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Exchange
from .exchange_choice import exchange_among
from .one_level import cut, sum_in_one_level
from .plan import two_level_plan

MANY = 16
"""From so many ranks on one node, two levels save more messages than their further round costs."""


def groups_of(nodes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The ranks that add up among themselves first; () where one level is enough.

    `nodes` are all ranks, node by node. The groups are the nodes; on a single node with many ranks, neighbours, about
    as many as there are groups.
    """
    world_size = sum(map(len, nodes))
    if 1 < len(nodes) < world_size:
        return tuple(map(tuple, nodes))
    if len(nodes) == 1 and world_size >= MANY:
        # A power of two: where the number of micro-batches is one too, each group has one subtree.
        size = 2 ** (int(math.log2(world_size)) // 2)
        ranks = tuple(nodes[0])
        return tuple(ranks[first : first + size] for first in range(0, world_size, size))
    return ()


class TwoLevels:
    """The sum on a process group in two levels; `nodes` are the groups of its ranks that add up first."""

    def __init__(self, group: dist.ProcessGroup, nodes: tuple[tuple[int, ...], ...], device: torch.device) -> None:
        self._nodes = nodes
        self._here = next(node for node, members in enumerate(nodes) if group.rank() in members)
        members, self._chunks = nodes[self._here], max(map(len, nodes))
        # The tags 0 and 1 belong to the exchange between all ranks.
        self._node = exchange_among(group, device, members, tag=2)
        # Chunks that each rank of this node owns, and the lanes of those that this rank owns.
        self._owned = [_owned(index, len(members), self._chunks) for index in range(len(members))]
        self._lanes: list[Exchange] = []
        for chunk in self._owned[self._node.rank]:
            lane = [other[chunk * len(other) // self._chunks] for other in nodes]
            self._lanes.append(exchange_among(group, device, lane, tag=4))

    def cost_of_one_round(self, out: Tensor) -> float:
        """Bytes that leave a node in addition if every rank sends its whole subtree to all others."""
        nodes, world_size = len(self._nodes), sum(map(len, self._nodes))
        messages = max(len(members) * (world_size - len(members)) for members in self._nodes)
        return (messages - 2 * (nodes - 1) / nodes) * out.numel() * out.element_size()

    def phases(self, own: Sequence[Tensor], out: Tensor, micro_batches: int) -> Iterator[None]:
        """See `OrderedSum.phases`."""
        plan = two_level_plan(micro_batches, self._nodes)
        chunks = cut(out, self._chunks)
        cuts = [slice(chunks[owned.start].start, chunks[owned.stop - 1].stop) for owned in self._owned]
        within = plan.nodes[self._here]

        node = self._node.collect(own, out, [len(spans) for spans in within.spans], cuts)
        node.expect()
        subtrees = within.fold_(node.arrivals)
        yield

        sizes = [chunks[chunk].stop - chunks[chunk].start for chunk in self._owned[self._node.rank]]
        parts = [torch.split(subtree, sizes) for subtree in subtrees]
        for position, (lane, mine) in enumerate(zip(self._lanes, torch.split(node.mine, sizes), strict=True)):
            if mine.numel():
                sum_in_one_level(lane, [part[position] for part in parts], mine, plan.across)
        node.spread()
        yield

        node.end()


def _owned(index: int, members: int, chunks: int) -> range:
    """The chunks that local index `index` of a node owns: those with `chunk * members // chunks == index`."""
    return range(-(-index * chunks // members), -(-(index + 1) * chunks // members))
