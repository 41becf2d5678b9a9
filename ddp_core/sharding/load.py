"""The gradients of one block of a fully sharded model, from the moment a backward has made them to their sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ddp_core.base.torch_internals import sent_together
from ddp_core.base.user_code import our_code
from ddp_core.reduction.exchange import WholeExchange
from ddp_core.reduction.flat import record_use
from ddp_core.reduction.round_sum import RoundSum

from .rows import Rows


class Load:
    """What `part`, a module of fully_shard, sends in a backward: a flat tensor of W parts, one for each rank.

    A part has the rows of that rank of one parameter after the other, each filled up to the length of the first rank's.
    `arrived` is called when a flat tensor is ready. All loads share `unread`.
    """

    def __init__(
        self,
        part: FSDPModule,
        rows: Mapping[int, Rows],
        exchange: WholeExchange,
        arrived: Callable[[], None],
        unread: Unread,
    ) -> None:
        members = sent_together(part)
        self.rows = [rows[id(sharded)] for sharded, _ in members]
        self.present: set[int] = set()
        """The positions of the parameters that have a gradient from this pass."""
        self.ready = False
        elements = sum(row.reach for row in self.rows)
        self._cuts = [slice(rank * elements, (rank + 1) * elements) for rank in range(exchange.world_size)]
        self.like = next((row.local.new_empty(0) for row in self.rows), torch.empty(0))
        """An empty tensor with the dtype and device of the gradients."""
        self._sharded = [sharded for sharded, _ in members]
        self._exchange, self._arrived = exchange, arrived
        self._sum: RoundSum | None = None
        self._flat: Tensor | None = None
        self._kept: list[Tensor | None] = [None] * len(members)
        self._is_open = False
        for position, (_, whole) in enumerate(members):
            whole.register_post_accumulate_grad_hook(functools.partial(self._mark, position))
        part.set_gradient_divide_factor(1)
        part.set_force_sum_reduction_for_comms(True)
        part.set_reduce_scatter_unused_params(exchange.world_size > 1, recurse=False)
        part.set_custom_reduce_scatter(_Handover(self._take, self._cuts[-1].stop, unread))  # type: ignore[arg-type]

    def begin(self, micro_batches: int) -> None:
        """Start a step."""
        self._sum = RoundSum(self._exchange, self._cuts[-1].stop, self.like, micro_batches, self._cuts)

    def open(self) -> None:
        """Start a pass."""
        self.present.clear()
        self.ready, self._is_open, self._flat = False, True, None

    def close(self) -> None:
        """End a pass, and forget what fully_shard has put into `.grad`: this load has it."""
        self._is_open = False
        for sharded in self._sharded:
            sharded.grad = None

    def complete(self) -> None:
        """After a pass: be ready, also without a gradient."""
        if self._exchange.world_size == 1:
            self._flat = torch.cat([self.like, *map(self._kept_or_missing, range(len(self.rows)))])
        self.ready = True

    def take(self, counts: bool) -> Tensor | None:
        """The flat tensor of this pass, to be pushed; None where it does not count."""
        flat, self._flat = self._flat, None
        if not counts:
            return None
        return self.like.new_full((self._cuts[-1].stop,), -0.0) if flat is None else flat

    def push(self, flat: Tensor | None) -> Tensor:
        """Exchange the next round, which brings up to W neighbouring leaves; a job for a channel."""
        assert self._sum is not None
        record_use([flat])
        self._sum.push(flat)
        return self.like

    def total(self) -> Iterator[Tensor]:
        """The sum over all micro-batches, one parameter's rows after the other."""
        assert self._sum is not None
        parts = self._sum.own_total().split([row.reach for row in self.rows])
        self._sum = None
        for row, part in zip(self.rows, parts, strict=True):
            yield part[: row.stop - row.start]

    @our_code
    def _mark(self, position: int, whole: Tensor) -> None:
        if not self._is_open:
            raise RuntimeError("backward outside of ExactReduction.micro_batch: run each backward in one of its own")
        assert whole.grad is not None
        if whole.grad.is_sparse:
            raise ValueError("sparse gradients have no fixed shape to sum in order: use sparse=False")
        self.present.add(position)
        if self._exchange.world_size == 1:
            # fully_shard calls no reduce-scatter for one rank, and would add up gradients by itself.
            self._kept[position], whole.grad = whole.grad, None

    def _kept_or_missing(self, position: int) -> Tensor:
        kept, self._kept[position] = self._kept[position], None
        return self.like.new_full((self.rows[position].reach,), -0.0) if kept is None else kept.reshape(-1)

    def _take(self, flat: Tensor) -> None:
        """Take what fully_shard hands over, with -0.0 for a missing gradient: it has +0.0 there, which changes -0.0."""
        if not self.present:
            # Not a backward's end yet: a module that runs several times in a pass hands over after each.
            return
        if self._flat is not None or self.ready:
            raise RuntimeError(
                f"the block with {self.rows[0].name} hands over its gradients in several parts, whose sum would depend "
                "on their order: let no part of it run more often than the rest"
            )
        parts = flat.view(self._exchange.world_size, -1)
        for position, columns in enumerate(parts.split([row.reach for row in self.rows], dim=1)):
            if position not in self.present:
                columns.fill_(-0.0)
        self._flat, self.ready = flat, True
        self._arrived()


class Unread:
    """Memory for the sums that torch puts into `.grad` after each backward, which are wrong here: nothing reads them.

    All blocks share it; otherwise each would keep its own until the end of the pass.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def memory(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """So many elements, which others have, too."""
        if self._memory.numel() < elements or (self._memory.dtype, self._memory.device) != (dtype, device):
            self._memory = torch.empty(elements, dtype=dtype, device=device)
        return self._memory[:elements]


class _Handover:
    """Stands in the place of torch's reduce-scatter, and hands the flat tensor on to be added up in the background."""

    def __init__(self, take: Callable[[Tensor], None], elements: int, unread: Unread) -> None:
        self._take, self._elements, self._unread = take, elements, unread

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a flat tensor, or for the part of its sum that torch expects."""
        (elements,) = size
        if elements == self._elements:
            return torch.empty(elements, dtype=dtype, device=device)
        return self._unread.memory(elements, dtype, device)

    @our_code
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        """Hand over `input_tensor`."""
        self._take(input_tensor)
