"""Strided shares: rank r of W computes micro-batches r, r + W, r + 2W, …, and ranks exchange after every backward.

This is how loaders of other libraries deal batches. Each round brings W neighbouring leaves of the tree, so the rank
that sums a part of the gradients can push them onto a binary counter (`round_sum`): the same tree and bits as with
contiguous shares. In a step, a rank sends M / W + 1 halves of an all-reduce where contiguous shares send two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_core.base.torch_internals import keep_static_graph_from_reducing, rebuild_buckets

from .communication import Channel
from .flat import Gradients
from .round_sum import LeafSum


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
