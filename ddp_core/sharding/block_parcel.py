"""The gradients of one block of a fully sharded model, which torch's `fully_shard` lays end to end and hands over."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ddp_core.base.torch_internals import reduce_zeros_too, sent_together
from ddp_core.base.user_code import our_code
from ddp_core.reduction.flat import record_use

from .owned import Rows
from .parcels import Parcel


class BlockParcel(Parcel):
    """What `part`, a module of fully_shard with trained parameters, sends in a backward: W parts, one for each rank.

    A part has the rows of that rank of one parameter after the other, each filled up to the length of the first rank's.
    `rows` are this rank's by the id of their sharded parameter. All parcels share `unread`.
    """

    _flat: Tensor | None = None

    def __init__(self, part: FSDPModule, rows: Mapping[int, Rows], world_size: int, unread: UnreadMemory) -> None:
        members = sent_together(part)
        self.rows = [rows[id(sharded)] for sharded, _ in members]
        self.count = len(members)
        self.like = self.rows[0].local.new_empty(0)
        own = sum(row.reach for row in self.rows)
        self.cuts = [slice(rank * own, (rank + 1) * own) for rank in range(world_size)]
        self.elements = world_size * own
        self._world_size = world_size
        self._sharded = [sharded for sharded, _ in members]
        self._present: set[int] = set()
        self._kept: list[Tensor | None] = [None] * len(members)
        self.hooks = [
            whole.register_post_accumulate_grad_hook(functools.partial(self._made, position))
            for position, (_, whole) in enumerate(members)
        ]
        part.set_gradient_divide_factor(1)
        part.set_force_sum_reduction_for_comms(True)
        if world_size > 1:
            reduce_zeros_too(part)
        part.set_custom_reduce_scatter(_Handover(self._receive, self.elements, unread))  # type: ignore[arg-type]

    def open(self) -> None:
        super().open()
        self._flat = None
        self._present.clear()

    def close(self) -> None:
        """Take no more gradients, and forget what fully_shard has put into `.grad`: they are in this parcel."""
        super().close()
        for sharded in self._sharded:
            sharded.grad = None

    def complete(self) -> None:
        if self._world_size == 1:
            self._flat = torch.cat([*map(self._kept_or_missing, range(self.count))])
        super().complete()

    def take(self) -> tuple[Tensor | None, list[bool]]:
        flat, self._flat = self._flat, None
        return flat, [position in self._present for position in range(self.count)]

    def flattened(self, taken: Tensor | None) -> Tensor:
        record_use([taken])
        return self.like.new_full((self.elements,), -0.0) if taken is None else taken

    def give(self, total: Tensor, used: Sequence[bool]) -> None:
        parts = total.split([row.reach for row in self.rows])
        for row, part, is_used in zip(self.rows, parts, used, strict=True):
            row.tensor.grad = row.filled(part[: row.stop - row.start]) if is_used else None

    @our_code
    def _made(self, position: int, whole: Tensor) -> None:
        if not self.is_open:
            raise RuntimeError("backward outside of ExactReduction.micro_batch: run each backward in one of its own")
        assert whole.grad is not None
        if whole.grad.is_sparse:
            raise ValueError("sparse gradients have no fixed shape to sum in order: use sparse=False")
        self._present.add(position)
        if self._world_size == 1:
            # fully_shard calls no reduce-scatter for one rank, and would add up gradients by itself.
            self._kept[position], whole.grad = whole.grad, None

    def _kept_or_missing(self, position: int) -> Tensor:
        kept, self._kept[position] = self._kept[position], None
        return self.like.new_full((self.rows[position].reach,), -0.0) if kept is None else kept.reshape(-1)

    def _receive(self, flat: Tensor) -> None:
        """Take what fully_shard hands over, with -0.0 for a missing gradient: it has +0.0 there, which changes -0.0."""
        if not self._present:
            # Not a backward's end yet: a module that runs several times in a pass hands over after each.
            return
        if self._flat is not None or self.is_ready:
            raise RuntimeError(
                f"the block with {self.rows[0].name} hands over its gradients in several parts, whose sum would depend "
                "on their order: let no part of it run more often than the rest"
            )
        parts = flat.view(self._world_size, -1)
        for position, columns in enumerate(parts.split([row.reach for row in self.rows], dim=1)):
            if position not in self._present:
                columns.fill_(-0.0)
        self._flat, self.is_ready = flat, True
        self.became_ready()


class UnreadMemory:
    """Memory for the sums that torch puts into `.grad` after each backward, which are wrong here: nothing reads them.

    All blocks share it; otherwise each would keep its own until the end of the pass.
    """

    _memory = torch.empty(0)

    def of(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of so many elements; its memory is that of every other such tensor."""
        if self._memory.numel() < elements or (self._memory.dtype, self._memory.device) != (dtype, device):
            self._memory = torch.empty(elements, dtype=dtype, device=device)
        return self._memory[:elements]


class _Handover:
    """Stands in the place of torch's reduce-scatter, and hands the flat tensor on to be added up in the background."""

    def __init__(self, receive: Callable[[Tensor], None], elements: int, unread: UnreadMemory) -> None:
        self._receive, self._elements, self._unread = receive, elements, unread

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a flat tensor, or for the part of its sum that torch expects."""
        (elements,) = size
        if elements == self._elements:
            return torch.empty(elements, dtype=dtype, device=device)
        return self._unread.of(elements, dtype, device)

    @our_code
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        """Hand over `input_tensor`."""
        self._receive(input_tensor)
