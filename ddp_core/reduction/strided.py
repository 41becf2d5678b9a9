"""Strided shares: rank r of W computes micro-batches r, r + W, r + 2W, …, and ranks exchange after every backward.

This is how loaders of other libraries deal batches. They come in rounds: round k brings the W neighbouring leaves
k * W … k * W + W - 1 of the tree, the same one as with contiguous shares.

1. Cut the N elements into W parts; rank r sums part r.
2. In each round every rank sends part r of its leaf to rank r: (W-1)/W * N elements.
3. Rank r adds part r of the round's leaves up as far as the tree goes, and pushes the sums in order onto a binary
   counter, the canonical tree for this part: N/W * (log2(M) + 1) elements at most, however the leaves lie.
4. After the last round every rank sends its part of the sum to all others: (W-1)/W * N elements.

Each element sees the same additions as in `ordered_sum`. Where each rank needs its own part alone, step 4 is left out.
On several nodes, steps 2 and 4 go in two levels (`parts`): the leaves of a node's ranks are neighbours, too. In a step,
a rank sends M / W + 1 halves of an all-reduce where contiguous shares send two.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Generator, Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_core.base.torch_internals import keep_static_graph_from_reducing, rebuild_buckets

from .communication import Channel, Transfer, in_last_phase
from .flat import Gradients, flat_groups, laid_out, record_use, views_of
from .ordered_sum import OrderedSum
from .parts import Parts, are_whole
from .tree import Plan, Span, Subtree, merge_


class StridedShares:
    """Exchanges each round in the background while the next micro-batch runs, and then frees its memory.

    Until `close`, DDP sends nothing by itself, so a forward may also be run outside of `backward`.
    """

    def __init__(self, ddp: DistributedDataParallel | None, gradients: Gradients, channel: Channel) -> None:
        self._ddp, self._gradients, self._channel = ddp, gradients, channel
        self._leaves = self._rounds = 0
        self._sum: LeafSum | None = None
        self._under_way: list[torch.futures.Future[Tensor]] = []
        self._silence = contextlib.ExitStack()
        if ddp is not None:
            self._silence.enter_context(ddp.no_sync())

    def share(self, micro_batches: int) -> range:
        return range(self._channel.by_parts.rank, micro_batches, self._channel.by_parts.world_size)

    def begin(self, micro_batches: int) -> None:
        self._wait()
        if self._ddp is not None:
            # A collective that DDP would run in the next forward, which a rank with an empty share does not have.
            rebuild_buckets(self._ddp)
        self._leaves, self._rounds, self._sum = micro_batches, 0, None

    def backward(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Run the backward of micro-batch `index` inside, and the forward inside or before."""
        if self._ddp is not None and self._ddp.static_graph:
            keep_static_graph_from_reducing(self._ddp)
        return contextlib.nullcontext()

    def push(self, statistics: Tensor) -> None:
        gradients = self._gradients.take()
        present = torch.tensor([float(gradient is not None) for gradient in gradients], device=self._channel.device)
        self._start_round(self._sum_like(statistics), [*gradients, statistics, present])

    def finish(self, statistics: Tensor) -> None:
        self._gradients.refuse_foreign()
        total = self._sum_like(statistics)
        while self._rounds * self._channel.by_parts.world_size < self._leaves:
            self._start_round(total, None)
        *sums, summed_statistics, used = total.totals()
        self._wait()
        statistics.copy_(summed_statistics)
        for parameter, gradient, count in zip(self._gradients.parameters, sums, used.tolist(), strict=True):
            parameter.grad = gradient if count else None
        self._sum = None

    def close(self) -> None:
        """Let DDP send gradients by itself again, and hold the process group no longer."""
        self._silence.close()
        self._sum = None

    def _sum_like(self, statistics: Tensor) -> LeafSum:
        """The sum of this step, made for its first leaf; a leaf is all gradients and the two tensors below."""
        if self._sum is None:
            parameters = self._gradients.parameters
            present = torch.empty(len(parameters), device=self._channel.device)
            # The last two are the batch-norm statistics, and for each parameter how many micro-batches have used it.
            leaf = [*(parameter.detach() for parameter in parameters), statistics, present]
            self._sum = LeafSum(self._channel, leaf, self._leaves)
        return self._sum

    def _start_round(self, total: LeafSum, leaf: Sequence[Tensor | None] | None) -> None:
        # One round at a time: a slow network must not pile up gradients.
        self._wait()
        self._rounds += 1
        self._under_way = total.push(leaf)

    def _wait(self) -> None:
        for future in self._under_way:
            future.wait()
        self._under_way = []


class RoundSum:
    """One step's sum of flat tensors of `elements` elements over `leaves` micro-batches.

    Collective: every rank makes the same calls in the same order. `like` has the tensors' dtype and device. `cuts` are
    the ranks' parts of a flat tensor. Without them parts are about equal, or every rank sums the whole tensor where
    that costs no more: the same additions, and step 4 is saved.
    """

    def __init__(
        self, parts: Parts, elements: int, like: Tensor, leaves: int, cuts: Sequence[slice] | None = None
    ) -> None:
        self._parts, self._elements, self._like, self._leaves = parts, elements, like, leaves
        self._cuts = parts.cuts(elements, like.dtype, -(-leaves // parts.world_size)) if cuts is None else cuts
        self._next_leaf = 0
        self._subtrees: list[Subtree] = []
        """The binary counter."""

    def push(self, flat: Tensor | None) -> Generator[None, None, None]:
        """Exchange the leaves of the next round, in phases as those of `OrderedSum`. This rank's leaf is `flat`.

        It may not be used any more. None on a rank without a leaf in the last round.
        """
        if not self._elements:
            return
        plan = _plan_of_round(self._leaves, self._next_leaf, self._parts.world_size)
        self._next_leaf += self._parts.world_size
        sums = yield from self._parts.fold([] if flat is None else [flat], self._like, plan, self._cuts)
        for span, part in zip(plan.rest, sums, strict=True):
            self._subtrees.append(Subtree(span, [part]))
            merge_(self._subtrees, self._leaves)

    def own_total(self) -> Tensor:
        """Return this rank's part of the sum over all leaves."""
        if not self._elements:
            return self._like.new_empty(0)
        (root,) = self._subtrees
        (mine,) = root.tensors
        assert mine is not None
        return mine

    def total(self) -> Tensor:
        """Return the sum over all leaves, in one flat tensor."""
        mine = self.own_total()
        if not self._elements or are_whole(self._cuts):
            return mine
        whole = self._like.new_empty(self._elements)
        whole[self._cuts[self._parts.rank]] = mine
        self._parts.gather([(whole, self._cuts)])
        return whole


class LeafSum:
    """One step's sum over `leaves` leaves, each of tensors like those of `like`, which travel in a few flat tensors.

    Collective: every rank makes the same calls in the same order. They are carried out in the background.
    """

    def __init__(self, channel: Channel, like: Sequence[Tensor], leaves: int) -> None:
        self._channel = channel
        self._groups = flat_groups(like)
        self._like = [[like[position] for position in positions] for positions in self._groups]
        parts = channel.by_parts
        self._sums = [RoundSum(parts, sum(map(Tensor.numel, group)), group[0], leaves) for group in self._like]
        # A group is laid end to end only when its turn has come: copies of gradients must not pile up.
        self._under_way = threading.BoundedSemaphore(OrderedSum.PHASES)

    def push(self, leaf: Sequence[Tensor | None] | None) -> list[torch.futures.Future[Tensor]]:
        """Start to exchange the next round; `leaf` (None on a rank without one) is free again when that is done."""
        futures = []
        for positions, like, total in zip(self._groups, self._like, self._sums, strict=True):
            tensors = None if leaf is None else [leaf[position] for position in positions]
            futures.append(self._channel.submit(self._pushing(total, like, tensors), like[0]))
        return futures

    def totals(self) -> list[Tensor]:
        """Wait until all rounds are done; return the sums of the tensors of a leaf."""
        totals = [
            self._channel.submit(in_last_phase(total.total), like[0])
            for like, total in zip(self._like, self._sums, strict=True)
        ]
        found: dict[int, Tensor] = {}
        for positions, like, total in zip(self._groups, self._like, totals, strict=True):
            found |= dict(zip(positions, views_of(total.wait(), like), strict=True))
        return [found[position] for position in range(len(found))]

    def _pushing(self, total: RoundSum, like: Sequence[Tensor], tensors: Sequence[Tensor | None] | None) -> Transfer:
        with self._under_way:
            flat = None
            if tensors is not None:
                flat = laid_out(tensors, like)
                record_use(tensors)
            yield from total.push(flat)
        return like[0]


@functools.lru_cache(maxsize=256)
def _plan_of_round(leaves: int, first: int, world_size: int) -> Plan:
    """The plan of the round that begins with the leaf `first`; made once."""
    ranks = range(first, first + world_size)
    return Plan(leaves, [[Span(leaf, leaf + 1)] if leaf < leaves else [] for leaf in ranks])
