"""Who brings which subtrees of the tree to a step, and in which order they are added."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.shares import share_of

from .tree import Span, are_siblings, canonical_subtrees


class Plan:
    """Which rank brings which subtrees to a step of `micro_batches`, and in which order they are added."""

    def __init__(self, micro_batches: int, world_size: int) -> None:
        shares = [share_of(micro_batches, rank, world_size) for rank in range(world_size)]
        self.spans = [canonical_subtrees(share.start, share.stop, micro_batches) for share in shares]
        # For each subtree in order: how many additions its arrival makes possible.
        self.merges: list[int] = []
        stack: list[Span] = []
        for span in (span for spans in self.spans for span in spans):
            stack.append(span)
            self.merges.append(0)
            while len(stack) > 1 and are_siblings(stack[-2], stack[-1], micro_batches):
                right, left = stack.pop(), stack.pop()
                stack.append(Span(left.first, right.stop))
                self.merges[-1] += 1
        assert stack == [Span(0, micro_batches)]

    def add_(self, arrivals: Sequence[tuple[Tensor, dist.Work | None]], out: Tensor) -> None:
        """Add the subtrees' tensors, each once its work is done, into `out`; the tensors are overwritten."""
        stack: list[Tensor] = []
        additions = len(arrivals) - 1
        for (tensor, work), merges in zip(arrivals, self.merges, strict=True):
            if work is not None:
                work.wait()
            stack.append(tensor)
            for _ in range(merges):
                right, left = stack.pop(), stack.pop()
                additions -= 1
                stack.append(torch.add(left, right, out=left if additions else out))
        if stack[0].data_ptr() != out.data_ptr():
            out.copy_(stack[0])


@functools.lru_cache(maxsize=64)
def plan_for(micro_batches: int, world_size: int) -> Plan:
    """The plan of a step, made once."""
    return Plan(micro_batches, world_size)
