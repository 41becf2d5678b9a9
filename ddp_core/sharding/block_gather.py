"""How torch's `fully_shard` gathers the parameters of a block: by messages, in two levels on several nodes.

gloo's own all-gather is a ring, in which every rank's part passes through every other rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ddp_core.reduction.parts import Parts, parts_on


def gather_by_messages(
    parts: Sequence[FSDPModule],
    group: dist.ProcessGroup,
    groups: tuple[tuple[int, ...], ...],
    device: torch.device,
) -> None:
    """Let these modules of fully_shard gather by messages on `group` where their parameters are in host memory.

    Nothing else sends messages on `group`. For `groups` see `parts_on`. NCCL's own all-gather knows the nodes.
    """
    if device.type == "cpu" and group.size() > 1:
        gather = _Gather(parts_on(group, groups, device))
        for part in parts:
            part.set_custom_all_gather(gather)  # type: ignore[arg-type]


class _Gather:
    """Stands in the place of torch's all-gather."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for all ranks' parts."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` with all ranks' parts, one after the other, and wait; `input_tensor` is this rank's."""
        size = input_tensor.numel()
        cuts = [slice(rank * size, (rank + 1) * size) for rank in range(group.size())]
        mine = output_tensor[cuts[group.rank()]]
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor)
        self._parts.gather([(output_tensor, cuts)])
