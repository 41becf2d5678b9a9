"""Ranks that have all weights, and own a piece of each large parameter: they update it, and send it to all others."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.base.seeds import share_of
from ddp_core.checkpoint import CutTensor
from ddp_core.reduction import ExactReduction
from ddp_core.reduction.agreement import refuse_unfit_shares, require_agreement
from ddp_core.reduction.communication import Channel, Transfer, in_last_phase
from ddp_core.reduction.flat import Gradients, in_memory_order, record_use
from ddp_core.reduction.ordered_sum import groups_of
from ddp_core.reduction.parts import order_of
from ddp_core.reduction.tree import GradientTree, Span, add_, are_siblings, plan_for

from .owns_part import OwnsPart, first_after_step
from .parcels import GroupParcel, PartShares
from .rounds import Rounds
from .shards import FlatGroup, Shards, shard_groups
from .updates import OwnUpdates

_THREADS = 2
"""A group is folded and sent while the one before it arrives and is added up; no more are on their way at a time.

In two levels, one more is on its way between nodes.
"""
_UNDER_WAY = 4
"""So many groups of gradients may be on their way at a time with strided shares."""


class OwnsPieces(OwnsPart):
    """Cuts the trained parameters of `module` into pieces, and lets `optimizer` update this rank's pieces.

        owned = OwnsPieces(model, optimizer, micro_batches=8, process_group=group)
        for index in owned.reduction.share:                    # an ExactReduction
            with owned.reduction.micro_batch(index):
                loss_sum(model(x[index]), y[index]).backward()
        owned.reduction.finish(scale=1 / samples)              # the `.grad` of this rank's pieces
        optimizer.step()                                       # then all ranks gather the parameters

    With contiguous shares a rank keeps whole gradients until its last backward of a step, and sends them in that one.
    With strided shares it sends them in every backward, which frees them. Ranks of one node add up among themselves
    before nodes exchange; `node` is that of `ExactReduction`. No DistributedDataParallel around the module.
    The parameters stay the same objects with the same values and strides, in new memory: do not move the module
    afterwards. The same on every rank. Raises UserError (2) for an optimizer that may not treat each element
    by itself and for parameters that share memory, and ValueError for ranks that do not agree.
    """

    reduction: ExactReduction

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        micro_batches: int,
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        shares: Literal["contiguous", "strided"] = "contiguous",
        node: str | int | None = None,
    ) -> None:
        super().__init__(module, optimizer, process_group)
        rank, world_size = (self.group.rank(), self.group.size()) if self.group is not None else (0, 1)
        gradients = Gradients(module.named_parameters())
        nodes: list[list[int]] = []
        if self.group is not None:
            kind = f"{shares}, in {len(shard_groups(gradients.parameters))} flat tensors"
            nodes = require_agreement(self.group, micro_batches, kind, gradients, node)
        refuse_unfit_shares(shares, micro_batches, world_size)
        groups = groups_of(nodes)
        self._shards = Shards(gradients.parameters, order_of(groups, world_size))
        is_strided = shares == "strided" and self.group is not None
        threads = None if is_strided or groups else _THREADS
        self._channel = Channel(self.group, self.device, timeout, nodes, threads=threads)
        self.owned = self._shards.owned(rank, gradients.names)
        self._owned_by_id = dict(zip(map(id, gradients.parameters), self.owned, strict=True))
        # The last group first: backward makes its gradients first.
        parcels = [GroupParcel(group, self.owned, rank, gradients) for group in reversed(self._shards.groups)]
        given = (parcels, self.owned, gradients, self._channel, self.group)
        of_ranks = Rounds(*given, _UNDER_WAY) if is_strided else ContiguousPieces(*given)
        self.reduction = ExactReduction(module, micro_batches, process_group=self.group, shares=of_ranks)
        self.updates = OwnUpdates(optimizer, self._owned_by_id, self.group)
        self.hooks = [first_after_step(optimizer, lambda *_: self.gather_parameters())]

    def own_weights(self, copy: nn.Module | None = None) -> dict[str, Any]:
        state = super().own_weights(copy)
        cuts: dict[tuple[int, int], CutTensor] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            owned, value = self._owned_by_id.get(id(parameter)), state.get(name)
            if owned is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue
            key = (id(parameter), value.data_ptr())  # tied parameters have one memory
            if key not in cuts:
                own = None if owned.tensor is None else in_memory_order(value, parameter)[owned.start : owned.stop]
                cuts[key] = owned.cut_tensor(own, value.dtype)
            state[name] = cuts[key]
        return state

    def gather_parameters(self) -> None:
        """Bring all ranks' pieces of the parameters to every rank, and wait; a collective."""
        if self.group is None:
            return
        flats = [(group.flat, group.cuts) for group in self._shards.groups if group.flat.numel()]
        like = torch.empty(0, device=self.device)

        def gather() -> Tensor:
            self._channel.by_parts.gather(flats)
            return like

        self._channel.submit(in_last_phase(gather), like).wait()


class ContiguousPieces(PartShares[GroupParcel]):
    """Contiguous shares: a rank adds up what it can alone, in whole gradients, and sends in its last backward.

    In that one each flat group is sent as soon as its gradients are there: every rank sends each other its range of its
    subtrees, and adds up its own range in tree order. A gradient is let go of as soon as it is in a message.
    Not one machine with `Rounds`: this way a rank sends once in a step, in place of once in every backward.
    """

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
                return parcel.like
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
