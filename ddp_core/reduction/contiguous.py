"""Contiguous shares: every rank computes neighbouring micro-batches, and ranks exchange once, at the end of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_core.base.shares import share_of
from ddp_core.base.torch_internals import foreach_copy_, rebuild_buckets

from .buckets import BucketHook, can_overlap, no_sync
from .communication import Channel
from .flat import Gradients, flat_groups, scale_gradients_
from .tree import GradientTree, Subtree


class ContiguousShares:
    """Each rank adds up what it can alone; the exchange overlaps with the last backward where DDP allows that."""

    def __init__(self, ddp: DistributedDataParallel | None, gradients: Gradients, channel: Channel) -> None:
        self._ddp, self._gradients, self._channel = ddp, gradients, channel
        self._rank, self._world_size = channel.ordered_sum.rank, channel.ordered_sum.world_size
        self._hook = BucketHook(gradients.parameters, channel)
        if ddp is not None:
            self._hook.register(ddp)

    def share(self, micro_batches: int) -> range:
        """The micro-batches of a step that this rank computes, in order."""
        return share_of(micro_batches, self._rank, self._world_size)

    def begin(self, micro_batches: int) -> None:
        """Start a step."""
        self._overlapped = self._ddp is not None and can_overlap(self._ddp) and micro_batches >= self._world_size
        if self._ddp is not None and not self._overlapped:
            # A collective that DDP would run in the next forward, which a rank with an empty share does not have.
            rebuild_buckets(self._ddp)
        share = self.share(micro_batches)
        self._tree = GradientTree(micro_batches, share.start, share.stop)
        self._statistics = GradientTree(micro_batches, share.start, share.stop)
        self._hook.reduced.clear()

    @contextlib.contextmanager
    def backward(self, index: int) -> Iterator[None]:
        """Run forward and backward of micro-batch `index` inside."""
        last = self._overlapped and index == self._tree.span.stop - 1
        if last:
            self._hook.tree = self._tree
        try:
            with no_sync(self._ddp) if self._ddp is not None and not last else contextlib.nullcontext():
                yield
        finally:
            self._hook.tree = None

    def push(self, statistics: Tensor) -> None:
        """Take the gradients of the micro-batch that was run, and its batch-norm statistics."""
        if self._overlapped and self._tree.next_leaf == self._tree.span.stop - 1:
            self._tree.next_leaf += 1
        else:
            self._tree.push(self._gradients.take())
        if statistics.numel():
            self._statistics.push([statistics])

    def finish(self, statistics: Tensor, scale: float) -> None:
        """Set every `.grad` to the sum over all micro-batches times `scale`, and `statistics` to theirs."""
        if not self._overlapped:
            self._sum_all()
        elif missing := [name for index, name in enumerate(self._gradients.names) if index not in self._hook.reduced]:
            raise RuntimeError(
                f"no gradient for {missing[0]} ({len(missing)} parameters) in this rank's last micro-batch: "
                "construct DistributedDataParallel with find_unused_parameters=True "
                "(`ddp train`: --set ddp.find_unused_parameters=true)"
            )
        if statistics.numel():
            own = [tensor for subtree in self._statistics.subtrees for tensor in subtree.tensors if tensor is not None]
            self._channel.sum(own, statistics, self._tree.leaves)
        scale_gradients_(self._gradients.parameters, scale)

    def close(self) -> None:
        """Nothing is held beside the channel."""

    def _sum_all(self) -> None:
        self._gradients.refuse_foreign()
        subtrees, parameters = self._tree.subtrees, self._gradients.parameters
        if self._world_size == 1:
            assert len(subtrees) == 1
            for parameter, gradient in zip(parameters, subtrees[0].tensors, strict=True):
                parameter.grad = gradient
            return
        present = [position for position, seen in enumerate(self._used_anywhere(subtrees)) if seen]
        gradients = [_first_gradient(subtrees, position, parameters[position]) for position in present]
        for position, gradient in zip(present, gradients, strict=True):
            parameters[position].grad = gradient
        for group in flat_groups(gradients):
            sums = [gradients[member] for member in group]
            own = [_flatten([subtree.tensors[present[member]] for member in group], sums) for subtree in subtrees]
            out = own[-1] if own else torch.cat([gradient.reshape(-1) for gradient in sums])
            self._channel.sum(own, out, self._tree.leaves)
            sizes = [gradient.numel() for gradient in sums]
            parts = [part.view(g.shape) for part, g in zip(torch.split(out, sizes), sums, strict=True)]
            foreach_copy_(sums, parts)

    def _used_anywhere(self, subtrees: Sequence[Subtree]) -> list[bool]:
        """For each parameter, whether a micro-batch of any rank has a gradient for it."""
        parameters = self._gradients.parameters
        used = torch.zeros(len(parameters), dtype=torch.float32, device=parameters[0].device if parameters else None)
        for subtree in subtrees:
            used += torch.tensor([float(t is not None) for t in subtree.tensors], device=used.device)
        # A count per rank is one leaf of a tree over ranks; small integers add exactly.
        self._channel.sum([used], used, self._world_size)
        return [count > 0 for count in used.tolist()]


def _first_gradient(subtrees: Sequence[Subtree], position: int, parameter: Tensor) -> Tensor:
    for subtree in subtrees:
        if (gradient := subtree.tensors[position]) is not None:
            return gradient
    return torch.zeros_like(parameter)


def _flatten(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    return torch.cat(
        [
            (torch.full_like(shape, -0.0) if tensor is None else tensor).reshape(-1)
            for tensor, shape in zip(tensors, like, strict=True)
        ]
    )
