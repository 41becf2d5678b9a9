"""Strided shares: rank r of W computes micro-batches r, r + W, r + 2W, …, and ranks exchange after every backward.

This is how loaders of other libraries deal batches. Each round brings W neighbouring leaves of the tree, so the rank
that sums a part of the gradients can push them onto a binary counter (`round_sum`): the same tree and bits as with
contiguous shares. It sends M / W + 1 halves of an all-reduce in a step where contiguous shares send two.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_core.torch_internals import keep_static_graph_from_reducing, rebuild_buckets

from .backends import exchange_on
from .communication import Channel, in_one_phase
from .flat import Gradients, fill_, flat_groups, views_of
from .round_sum import RoundSum


class StridedShares:
    """Each round is exchanged in the background while the next micro-batch runs; then its memory is free again.

    DDP sends nothing by itself any more, so a forward may also be run outside of `backward`.
    """

    def __init__(self, ddp: DistributedDataParallel | None, gradients: Gradients, channel: Channel) -> None:
        assert channel.group is not None
        self._ddp, self._gradients, self._channel = ddp, gradients, channel
        self._exchange = exchange_on(channel.group, channel.device)
        self._leaves = self._rounds = 0
        self._groups: list[_Group] = []
        self._under_way: list[torch.futures.Future[Tensor]] = []
        self._silence = contextlib.ExitStack()
        if ddp is not None:
            self._silence.enter_context(ddp.no_sync())

    def share(self, micro_batches: int) -> range:
        """The micro-batches of a step that this rank computes, in order."""
        return range(self._exchange.rank, micro_batches, self._exchange.world_size)

    def begin(self, micro_batches: int) -> None:
        """Start a step."""
        self._wait()
        if self._ddp is not None:
            # A collective that DDP would run in the next forward, which a rank with an empty share does not have.
            rebuild_buckets(self._ddp)
        self._leaves, self._rounds, self._groups = micro_batches, 0, []

    def backward(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Run the backward of micro-batch `index` inside, and the forward inside or before."""
        if self._ddp is not None and self._ddp.static_graph:
            keep_static_graph_from_reducing(self._ddp)
        return contextlib.nullcontext()

    def push(self, statistics: Tensor) -> None:
        """Take the gradients of the micro-batch that was run, and its batch-norm statistics; start to send them."""
        gradients = self._gradients.take()
        present = torch.tensor([float(gradient is not None) for gradient in gradients], device=self._channel.device)
        self._prepare(statistics)
        self._start_round([*gradients, statistics, present])

    def finish(self, statistics: Tensor) -> None:
        """Set every `.grad` to the sum over all micro-batches, and `statistics` to that of the statistics."""
        self._gradients.refuse_foreign()
        self._prepare(statistics)
        while self._rounds * self._exchange.world_size < self._leaves:
            self._start_round(None)
        totals = [self._channel.submit(in_one_phase(group.sum.total), group.like[0]) for group in self._groups]
        self._wait()
        sums: dict[int, Tensor] = {}
        for group, total in zip(self._groups, totals, strict=True):
            sums |= dict(zip(group.positions, views_of(total.wait(), group.like), strict=True))
        parameters = self._gradients.parameters
        used = sums.pop(len(parameters) + 1).tolist()
        statistics.copy_(sums.pop(len(parameters)))
        for position, parameter in enumerate(parameters):
            parameter.grad = sums[position] if used[position] else None
        self._groups = []

    def close(self) -> None:
        """Let DDP send again."""
        self._silence.close()

    def _prepare(self, statistics: Tensor) -> None:
        if not self._groups:
            parameters = self._gradients.parameters
            present = torch.empty(len(parameters), device=self._channel.device)
            # The last two are the batch-norm statistics, and for each parameter how many micro-batches have used it.
            leaf = [*(parameter.detach() for parameter in parameters), statistics, present]
            for positions in flat_groups(leaf):
                like = [leaf[position] for position in positions]
                elements = sum(tensor.numel() for tensor in like)
                total = RoundSum(self._exchange, elements, like[0], self._leaves)
                self._groups.append(_Group(positions, like, total))

    def _start_round(self, leaf: Sequence[Tensor | None] | None) -> None:
        # One round at a time: a slow network must not pile up gradients.
        self._wait()
        self._rounds += 1
        for group in self._groups:
            tensors = None if leaf is None else [leaf[position] for position in group.positions]
            push = in_one_phase(functools.partial(group.push, tensors))
            self._under_way.append(self._channel.submit(push, group.like[0]))

    def _wait(self) -> None:
        for future in self._under_way:
            future.wait()
        self._under_way = []


@dataclass
class _Group:
    """Tensors of a leaf that travel as one flat tensor: their positions, what they look like, their sum."""

    positions: list[int]
    like: list[Tensor]
    sum: RoundSum

    def push(self, tensors: Sequence[Tensor | None] | None) -> Tensor:
        """Exchange the next round; a job for the channel."""
        flat = None
        if tensors is not None:
            flat = self.sum.empty()
            fill_(views_of(flat, self.like), tensors)
            for tensor in tensors:
                if tensor is not None and tensor.is_cuda:
                    # Its memory must not be used anew before this stream has read it.
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
        self.sum.push(flat)
        return self.like[0]
