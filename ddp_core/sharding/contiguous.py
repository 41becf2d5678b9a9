"""Contiguous shares where each rank needs the gradients of its own pieces alone: the first half of an all-reduce.

A rank adds up what it can alone, in whole gradients. In its last backward each flat group is sent as soon as its
gradients are there: every rank sends each other its range of its subtrees, and adds up its own range in tree order.

Not one machine with `rounds`: this way a rank sends once in a step, in place of once in every backward.
"""

from __future__ import annotations

import contextlib
import threading

import torch
from torch import Tensor

from ddp_core.base.seeds import share_of
from ddp_core.reduction.communication import Transfer
from ddp_core.reduction.flat import record_use
from ddp_core.reduction.tree import GradientTree, Span, add_, are_siblings, plan_for

from .parcels import GroupParcel, PartShares
from .shards import FlatGroup

THREADS = 2
"""A group is folded and sent while the one before it arrives and is added up; no more are on their way at a time.

In two levels, one more is on its way between nodes.
"""


class ContiguousPieces(PartShares[GroupParcel]):
    """Sends each flat group in the last backward; a gradient is let go of as soon as it is in a message."""

    def share(self, micro_batches: int) -> range:
        return share_of(micro_batches, self.channel.by_parts.rank, self.channel.by_parts.world_size)

    def begin(self, micro_batches: int) -> None:
        share = self.share(micro_batches)
        self._tree = GradientTree(micro_batches, share.start, share.stop)
        self._statistics = GradientTree(micro_batches, share.start, share.stop)
        self._used = [[False] * parcel.count for parcel in self._parcels]
        self._totals: list[torch.futures.Future[Tensor]] = []
        self._begin_pass()
        self._under_way = threading.BoundedSemaphore(self.channel.threads)

    def backward(self, index: int) -> contextlib.AbstractContextManager[None]:
        return self._opened() if index == self._tree.span.stop - 1 else contextlib.nullcontext()

    def push(self, statistics: Tensor) -> None:
        if self._tree.next_leaf == self._tree.span.stop - 1:
            self._send_rest()
        else:
            self._tree.push(self.gradients.take())
        if statistics.numel():
            self._statistics.push([statistics])

    def finish(self, statistics: Tensor) -> None:
        self.gradients.refuse_foreign()
        # A rank without a micro-batch has sent nothing yet.
        self._send_rest()
        if statistics.numel():
            own = [tensor for subtree in self._statistics.subtrees for tensor in subtree.tensors if tensor is not None]
            self.channel.sum(own, statistics, self._tree.leaves)
        totals, self._totals = [total.wait() for total in self._totals], []
        flags = [float(is_used) for of_parcel in self._used for is_used in of_parcel]
        counts = torch.tensor(flags, device=self.channel.device)
        # A count per rank is one leaf of a tree over ranks; small integers add exactly.
        self.channel.sum([counts], counts, self.channel.by_parts.world_size)
        self._give(totals, counts)

    def _send(self, number: int) -> None:
        """Fold this rank's gradients of a parcel, and sum them over ranks, in the background."""
        parcel, tree = self._parcels[number], self._tree
        group = parcel.group
        subtrees = [(subtree.span, _taken(subtree.tensors, group)) for subtree in tree.subtrees]
        if self.share(tree.leaves):
            subtrees.append((tree.last_leaf, parcel.take()[0]))
        for _, tensors in subtrees:
            self._used[number] = [
                is_used or tensor is not None for is_used, tensor in zip(self._used[number], tensors, strict=True)
            ]

        def job() -> Transfer:
            own = _folded(group, subtrees, tree.leaves)
            if not parcel.elements:
                return group.empty()
            with self._under_way:
                plan = plan_for(tree.leaves, self.channel.by_parts.world_size)
                (total,) = yield from self.channel.by_parts.fold(own, parcel.like, plan, group.cuts)
                return total

        self._totals.append(self.channel.submit(job(), group.flat))


def _taken(tensors: list[Tensor | None], group: FlatGroup) -> list[Tensor | None]:
    """Take the group's tensors out of a subtree, so that they are freed when they have been sent."""
    taken = [tensors[position] for position in group.positions]
    for position in group.positions:
        tensors[position] = None
    return taken


def _folded(group: FlatGroup, subtrees: list[tuple[Span, list[Tensor | None]]], leaves: int) -> list[Tensor]:
    """Add the last leaf's sibling subtrees to it; return this rank's flat subtrees, which leaves `subtrees` empty."""
    own: list[Tensor] = []
    while subtrees:
        span, tensors = subtrees.pop()
        record_use(tensors)
        flat = group.flattened(tensors)
        tensors.clear()
        while not own and subtrees and are_siblings(subtrees[-1][0], span, leaves):
            left, tensors = subtrees.pop()
            record_use(tensors)
            views: list[Tensor | None] = list(group.views(flat))
            add_(views, tensors)
            span = left._replace(stop=span.stop)
        own.insert(0, flat)
    return own
