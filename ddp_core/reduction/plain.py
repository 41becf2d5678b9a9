"""Torch's own way: gradients add up in `.grad`, and DistributedDataParallel averages them over the ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_core.shares import share_of
from ddp_core.torch_internals import foreach_mul_


class PlainReduction:
    """`ExactReduction`'s interface without its promise: sums are made in whatever order is fastest.

    DDP divides what it sums by the number of ranks; a loss weighted by that number undoes it, and every `.grad` is the
    sum over all micro-batches, as with ExactReduction. A large batch is best weighted by `1 / samples` there as well,
    before it is summed; `finish` then needs no scale.
    """

    def __init__(self, module: nn.Module, micro_batches: int) -> None:
        self._module = module
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        group = module.process_group if isinstance(module, DistributedDataParallel) else None
        self.rank, self.world_size = (group.rank(), group.size()) if group is not None else (0, 1)
        self.share = share_of(micro_batches, self.rank, self.world_size)

    def begin(self, micro_batches: int) -> None:
        """Start a step of `micro_batches` micro-batches over all ranks."""
        self.share = share_of(micro_batches, self.rank, self.world_size)
        for parameter in self._parameters:
            parameter.grad = None

    def micro_batch(self, index: int, weight: float = 1.0) -> AbstractContextManager[None]:
        """One forward and backward; gradients travel during the backward of the rank's last one only."""
        if isinstance(self._module, DistributedDataParallel) and index < self.share.stop - 1:
            return self._module.no_sync()
        return nullcontext()

    def finish(self, scale: float = 1.0) -> None:
        """Complete the step: multiply every `.grad` by `scale`. (DDP has waited for them at the end of backward.)"""
        if scale != 1.0:
            foreach_mul_([parameter.grad for parameter in self._parameters if parameter.grad is not None], scale)

    def close(self) -> None:
        """Nothing to end."""
