"""Torch's own way: gradients add up in `.grad`, and DistributedDataParallel averages them over the ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_core.base.seeds import share_of


class PlainReduction:
    """`ExactReduction`'s interface without its promise: sums are made in whatever order is fastest.

    DDP divides its sums by the number of ranks. To undo this, weight the loss by that number: every `.grad` is then the
    sum over all micro-batches, as with ExactReduction. For a large batch it is best to weight the loss by
    `1 / samples`, too, before the sum.
    """

    def __init__(self, module: nn.Module, micro_batches: int) -> None:
        self._module = module
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        group = module.process_group if isinstance(module, DistributedDataParallel) else None
        self.rank, self.world_size = (group.rank(), group.size()) if group is not None else (0, 1)
        self.share = share_of(micro_batches, self.rank, self.world_size)

    def begin(self, micro_batches: int) -> None:
        self.share = share_of(micro_batches, self.rank, self.world_size)
        for parameter in self._parameters:
            parameter.grad = None

    def micro_batch(self, index: int, weight: float = 1.0) -> AbstractContextManager[None]:
        """One forward and backward; ranks exchange gradients only during the backward of their last micro-batch."""
        if isinstance(self._module, DistributedDataParallel) and index < self.share.stop - 1:
            return self._module.no_sync()
        return nullcontext()

    def finish(self) -> None:
        """Do nothing: DDP has summed the gradients by the end of backward."""

    def close(self, waits: bool = True) -> None:
        """Do nothing, whether the caller waits or not: this reduction holds nothing that has to be released."""
