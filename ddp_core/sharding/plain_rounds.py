"""Torch's own sums of a fully sharded model's gradients, after every backward; with the interface of PlainReduction."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ddp_core.base.torch_internals import reduce_zeros_too, sent_together
from ddp_core.base.user_code import our_code
from ddp_core.reduction.flat import scale_
from ddp_core.reduction.norm import clip_gradients_

from .blocks import refusing_bypasses
from .owned import Rows


class PlainRounds:
    """Sums without a promise: strided shares, torch's reduce-scatter, gradients of the rows that add up in `.grad`.

    As with `Rounds`, every rank must run the same number of passes. In an `idle_pass`, weight the loss by 0.
    """

    def __init__(
        self, parts: Sequence[FSDPModule], rows: Mapping[int, Rows], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._group, self._device = group, device
        self._members = [(sharded, rows[id(sharded)]) for part in parts for sharded, _ in sent_together(part)]
        self._present: set[int] = set()
        self._leaves = 0
        wholes = (whole for part in parts for _, whole in sent_together(part))
        for position, whole in enumerate(wholes):
            whole.register_post_accumulate_grad_hook(functools.partial(self._mark, position))
        for part in parts:
            # Sums, not means: gloo has nothing else.
            part.set_gradient_divide_factor(1)
            part.set_force_sum_reduction_for_comms(True)
            reduce_zeros_too(part)

    @property
    def share(self) -> range:
        """The micro-batches that this rank computes in the step at hand, in order."""
        return range(self._group.rank(), self._leaves, self._group.size())

    @property
    def idle_passes(self) -> int:
        """How many passes this rank has to run in this step after those of its micro-batches: one or none."""
        return -(-self._leaves // self._group.size()) - len(self.share)

    def idle_pass(self) -> contextlib.AbstractContextManager[None]:
        """Run forward and backward of any micro-batch inside, with a loss weight of 0."""
        return refusing_bypasses()

    def begin(self, micro_batches: int) -> None:
        """Start a step of `micro_batches` micro-batches over all ranks."""
        self._leaves = micro_batches
        self._present.clear()
        for sharded, rows in self._members:
            sharded.grad = rows.tensor.grad = None

    def micro_batch(self, index: int, weight: float = 1.0) -> contextlib.AbstractContextManager[None]:
        """One forward and backward; ranks exchange gradients in each."""
        return refusing_bypasses()

    def finish(self, scale: float = 1.0) -> None:
        """Complete the step: the `.grad` of this rank's rows is the sum over all micro-batches times `scale`.

        It stays None for a parameter that no micro-batch has used.
        """
        own = [float(position in self._present) for position in range(len(self._members))]
        used = torch.tensor(own, device=self._device)
        dist.all_reduce(used, group=self._group)
        gradients = []
        for (sharded, rows), is_used in zip(self._members, used.tolist(), strict=True):
            if is_used and sharded.grad is not None:
                part = cast(DTensor, sharded.grad).to_local().view(-1)
                rows.tensor.grad = rows.filled(part)
                gradients.append(rows.tensor.grad)
            sharded.grad = None
        scale_(gradients, scale)

    @torch.no_grad()
    def clip_gradients_(self, max_norm: float) -> Tensor:
        """Multiply all gradients by max_norm / norm where that is below 1; returns the norm of the whole gradient.

        A collective. Call it between `finish` (and a scaler's `unscale_`) and the update.
        """
        tensors = [rows.tensor for _, rows in self._members]
        own = nn.utils.get_total_norm([tensor.grad for tensor in tensors if tensor.grad is not None])
        # In float64, in which the square of no float32 overflows.
        squares = own.to(self._device, torch.float64).square()
        dist.all_reduce(squares, group=self._group)
        norm = squares.sqrt()
        clip_gradients_(tensors, norm, max_norm)
        return norm

    def close(self, waits: bool = True) -> None:
        """Do nothing: this holds nothing that has to be released."""

    @our_code
    def _mark(self, position: int, _: Tensor) -> None:
        self._present.add(position)
