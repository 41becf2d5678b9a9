"""Contiguous shares where each rank needs the gradients of its own pieces alone: the first half of an all-reduce.

A rank adds up what it can alone, in whole gradients. In its last backward each flat group is sent as soon as its
gradients are there: every rank sends each other its range of its subtrees, and adds up its own range in tree order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from ddp_core.base.shares import share_of

from .communication import Channel, Transfer
from .departures import Departures
from .early_additions import EarlyAdditions
from .exchange import exchange_on
from .flat import Gradients, record_use
from .one_level import plan_for, sum_parts
from .sharded import arrived, clear_gradients, set_gradients
from .shards import FlatGroup, Shards
from .tree import GradientTree, Span, add_, are_siblings

PHASES = 2
"""A group is folded and sent while the one before it arrives and is added up; no more are on their way at a time."""


class ShardedContiguousShares:
    """Sends each flat group in the last backward; a gradient is let go of as soon as it is in a message."""

    def __init__(self, shards: Shards, gradients: Gradients, channel: Channel) -> None:
        self._shards, self._gradients, self._channel = shards, gradients, channel
        self._rank, self._world_size = channel.ordered_sum.rank, channel.ordered_sum.world_size
        self._exchange = None if channel.group is None else exchange_on(channel.group, channel.device)
        # Its hooks run first: what departs is the sum.
        self._additions = EarlyAdditions(gradients.parameters)
        self._departures = Departures(shards, self._send)
        self._under_way = threading.BoundedSemaphore(PHASES)

    def share(self, micro_batches: int) -> range:
        """The micro-batches of a step that this rank computes, in order."""
        return share_of(micro_batches, self._rank, self._world_size)

    def begin(self, micro_batches: int) -> None:
        """Start a step."""
        clear_gradients(self._shards, self._rank)
        share = self.share(micro_batches)
        self._tree = GradientTree(micro_batches, share.start, share.stop)
        self._statistics = GradientTree(micro_batches, share.start, share.stop)
        self._used = [False] * len(self._shards.parameters)
        self._totals: dict[int, torch.futures.Future[Tensor]] = {}
        self._departures.begin(watching=False)

    @contextlib.contextmanager
    def backward(self, index: int) -> Iterator[None]:
        """Run forward and backward of micro-batch `index` inside."""
        self._additions.begin(self._tree)
        if index == self._tree.span.stop - 1:
            self._departures.begin()
        try:
            yield
        finally:
            self._departures.stop()
            self._additions.stop()

    def push(self, statistics: Tensor) -> None:
        """Take the gradients of the micro-batch that was run, and its batch-norm statistics."""
        if self._tree.next_leaf == self._tree.span.stop - 1:
            self._departures.send_rest()
            self._tree.next_leaf += 1
        else:
            self._tree.push(self._gradients.take())
        if statistics.numel():
            self._statistics.push([statistics])

    def finish(self, statistics: Tensor, scale: float) -> None:
        """Set the `.grad` of this rank's pieces to the sum over all micro-batches times `scale`, and `statistics`."""
        self._gradients.refuse_foreign()
        # Of a rank without a micro-batch, nothing has been sent yet.
        self._departures.send_rest()
        if statistics.numel():
            own = [tensor for subtree in self._statistics.subtrees for tensor in subtree.tensors if tensor is not None]
            self._channel.sum(own, statistics, self._tree.leaves)
        totals = arrived(self._totals, scale)
        used = torch.tensor([float(used) for used in self._used], device=self._channel.device)
        # A count per rank is one leaf of a tree over ranks; small integers add exactly.
        self._channel.sum([used], used, self._world_size)
        set_gradients(self._shards, self._rank, totals, [count > 0 for count in used.tolist()])
        self._totals = {}

    def close(self) -> None:
        """Take the hooks away."""
        self._departures.close()
        self._additions.close()

    def _send(self, number: int) -> None:
        """Fold this rank's gradients of a group, and sum them over ranks, in the background."""
        group, tree = self._shards.groups[number], self._tree
        subtrees = [(subtree.span, _taken(subtree.tensors, group)) for subtree in tree.subtrees]
        if self.share(tree.leaves):
            subtrees.append((tree.last_leaf, self._gradients.take(group.positions)))
        for _, tensors in subtrees:
            for position, tensor in zip(group.positions, tensors, strict=True):
                self._used[position] |= tensor is not None

        def job() -> Transfer:
            own = _folded(group, subtrees, tree.leaves)
            plan = plan_for(tree.leaves, self._world_size)
            if self._exchange is None:
                (total,) = plan.fold_([(flat, None) for flat in own])
                return total
            if not group.flat.numel():
                return group.empty()
            with self._under_way:
                like = own[-1] if own else group.empty()
                return (yield from sum_parts(self._exchange, own, like, plan, group.cuts))

        self._totals[number] = self._channel.submit(job(), group.flat)


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
