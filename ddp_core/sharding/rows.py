"""This rank's rows of a parameter: what its optimizer updates, and how the rows of all ranks make up the whole again.

torch's `fully_shard` cuts a parameter between rows, that is along its first dimension: rank r of W has the r-th part of
ceil(rows / W) rows. The last parts may be shorter, or empty.

An optimizer's vectorised kernel treats the elements behind a tensor's last full vector apart, and in torch's fused
kernels these get other bits. So the tensor that the optimizer updates begins and ends where a line of `LINE_BYTES` of
the whole parameter does. Where rows do not, it is a copy with a few more elements around them, which count for nothing,
and the rows are copied back after every update.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.checkpoint import CutTensor
from ddp_core.reduction.exchange import LINE_BYTES


class Rows:
    """The rows of one parameter that this rank of `group` owns.

    `whole` is the parameter before it was cut, `local` the memory of its rows here, one after the other.
    """

    def __init__(self, name: str, whole: nn.Parameter, local: Tensor, group: dist.ProcessGroup) -> None:
        rank, world_size, elements = group.rank(), group.size(), whole.numel()
        rows = whole.shape[0]
        self.name, self.shape, self._strides, self._group = name, whole.shape, whole.stride(), group
        self.reach = -(-rows // world_size) * (elements // max(rows, 1))
        """The elements of the first rank's part, the longest."""
        self.start = min(rank * self.reach, elements)
        """This rank's part: elements start … stop - 1 of the whole."""
        self.stop = min(self.start + self.reach, elements)
        self.local = local
        line = LINE_BYTES // whole.element_size()
        begin, end = self.start, self.stop
        if begin < end:
            begin, end = begin // line * line, min(-(-end // line) * line, elements)
        self._inside = slice(self.start - begin, self.stop - begin)
        self._is_copy = (begin, end) != (self.start, self.stop)
        memory = local.new_zeros(end - begin) if self._is_copy else local
        self.tensor = nn.Parameter(memory, requires_grad=whole.requires_grad)
        """What an optimizer updates, in one dimension; it has a gradient of its own."""
        self.take()

    def take(self) -> None:
        """Let the optimizer's tensor have the values of the rows, which were changed elsewhere."""
        if self._is_copy:
            self.tensor.detach()[self._inside] = self.local

    def give(self) -> None:
        """Let the rows have the values of the optimizer's tensor, which were changed by an update."""
        if self._is_copy:
            self.local.copy_(self.tensor.detach()[self._inside])

    def filled(self, values: Tensor) -> Tensor:
        """Values of the rows as a tensor like the optimizer's; the same memory where the rows are not copied."""
        if not self._is_copy:
            return values
        filled = values.new_zeros(self.tensor.numel())
        filled[self._inside] = values
        return filled

    def of_whole(self, whole: Tensor) -> Tensor:
        """This rank's part of the values of a whole parameter. Raises ValueError for those of another shape."""
        if whole.shape != self.shape:
            raise ValueError(f"{self.name} has the shape {list(self.shape)}, not {list(whole.shape)}")
        return whole.reshape(-1)[self.start : self.stop]

    def of_filled(self, filled: Tensor) -> Tensor:
        """This rank's part of a tensor like the optimizer's."""
        return filled[self._inside]

    def cut_blocks(self, size: int) -> list[int]:
        """Which blocks of `size` elements of the whole lie on several ranks."""
        borders = range(self.reach, self.shape.numel(), max(self.reach, 1))
        return sorted({border // size for border in borders if border % size})

    def cut_tensor(self, values: Tensor) -> CutTensor:
        """Values of the whole, of which this rank has those of its rows, without those around them."""
        return CutTensor(values.dtype, tuple(self.shape), self._strides, {self.start: values})

    def put_together(self, values: Tensor) -> Tensor | None:
        """All ranks' values of their rows as those of the whole, in host memory, on rank 0; None on the others.

        A collective.
        """
        if not self.reach:
            return values.new_empty(self.shape).cpu() if self._group.rank() == 0 else None
        part = values.new_zeros(self.reach)
        part[: values.numel()] = values
        parts = [torch.empty_like(part) for _ in range(self._group.size())] if self._group.rank() == 0 else None
        dist.gather(part, parts, group=self._group, group_dst=0)
        if parts is None:
            return None
        whole = torch.cat(parts)
        if whole.numel() > self.shape.numel():
            whole = whole[: self.shape.numel()].clone()
        return whole.view(self.shape).cpu()
