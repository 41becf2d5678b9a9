"""Who brings which subtrees of the tree to a sum, and in which order they are added."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.base.shares import share_of

from .tree import Span, are_siblings, canonical_subtrees

Arrival = tuple[Tensor, dist.Work | None]
"""A subtree's tensor, and the work to wait for until it is there."""


class Plan:
    """The order of additions where several members each bring subtrees of one tree over `leaves` leaves.

    `spans` are each member's subtrees; `rest` are those that are left when all siblings have been added: the whole
    tree, or what a part of the members can add up among themselves.
    """

    def __init__(self, leaves: int, spans: Sequence[Sequence[Span]]) -> None:
        self.spans = spans
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
def plan_for(micro_batches: int, world_size: int) -> Plan:
    """The plan of a step in which each rank brings the subtrees of its share, made once."""
    return Plan(micro_batches, _shares(micro_batches, world_size))


class TwoLevelPlan:
    """The plan of a step in which the ranks of each node add first (`nodes`), then the nodes (`across`)."""

    def __init__(self, micro_batches: int, nodes: Sequence[Sequence[int]]) -> None:
        ranks = _shares(micro_batches, sum(len(members) for members in nodes))
        self.nodes = [Plan(micro_batches, [ranks[rank] for rank in members]) for members in nodes]
        self.across = Plan(micro_batches, [node.rest for node in self.nodes])


@functools.lru_cache(maxsize=64)
def two_level_plan(micro_batches: int, nodes: tuple[tuple[int, ...], ...]) -> TwoLevelPlan:
    """The two-level plan of a step on these nodes, each given by its ranks; made once."""
    return TwoLevelPlan(micro_batches, nodes)


def _shares(micro_batches: int, world_size: int) -> list[list[Span]]:
    shares = [share_of(micro_batches, rank, world_size) for rank in range(world_size)]
    return [canonical_subtrees(share.start, share.stop, micro_batches) for share in shares]
