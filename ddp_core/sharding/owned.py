"""The elements of one parameter that this rank owns: where they lie in the whole, and what its optimizer updates.

And the norm of a gradient of which each rank has such a part, with the bits of `ddp_core.reduction.norm`. It is made of
blocks of elements, and a rank's rows may end within a block. The few blocks that lie on several ranks are put together
first: a table has a place for each of their elements, and each rank fills in its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ddp_core.checkpoint import CutTensor
from ddp_core.reduction.communication import Channel
from ddp_core.reduction.exchange import LINE_BYTES
from ddp_core.reduction.flat import in_memory_order
from ddp_core.reduction.norm import BLOCK, first_blocks, norm_of, put_block_sums


class Owned:
    """Elements `start` … `stop` - 1 of the parameter `whole`, counted in the sequence in which they lie in memory.

    `tensor` is what this rank's optimizer updates in the place of the parameter, in one dimension (a single number
    has none); None where the rank owns no element of it.
    """

    def __init__(self, name: str, whole: nn.Parameter, start: int, stop: int, tensor: nn.Parameter | None) -> None:
        self.name, self.start, self.stop, self.tensor = name, start, stop, tensor
        self.like = torch.empty_strided(whole.shape, whole.stride(), dtype=whole.dtype, device="meta")
        """The whole parameter's dtype, shape and strides, without its memory."""
        self.is_trained = whole.requires_grad
        self.inside = slice(None)
        """Where the owned elements lie in `tensor`."""

    def of_whole(self, whole: Tensor | CutTensor) -> Tensor:
        """The owned elements of a whole parameter's values, of which nothing else is read where they are in a file.

        Raises ValueError for values of another shape.
        """
        if tuple(whole.shape) != tuple(self.like.shape):
            raise ValueError(f"{self.name} has the shape {list(self.like.shape)}, not {list(whole.shape)}")
        if isinstance(whole, CutTensor):
            if whole.strides == self.like.stride():
                return whole.elements(self.start, self.stop)
            whole = whole.whole()
        return in_memory_order(whole, self.like)[self.start : self.stop]

    def filled(self, values: Tensor) -> Tensor:
        """Values of the owned elements as a tensor like the optimizer's; the same memory where they are all of it."""
        if self.tensor is None or self.tensor.shape == values.shape:
            return values
        if not self.tensor.dim():
            return values.view(())
        filled = values.new_zeros(self.tensor.numel())
        filled[self.inside] = values
        return filled

    def cut_tensor(self, values: Tensor | None, dtype: torch.dtype) -> CutTensor:
        """Values for each element of the whole, of which this rank has those of the elements that it owns."""
        pieces = {} if values is None else {self.start: values.detach()}
        return CutTensor(dtype, tuple(self.like.shape), self.like.stride(), pieces)

    def cut_blocks(self, size: int) -> list[int]:
        """Which blocks of `size` elements of the whole lie on several ranks."""
        return []


class Rows(Owned):
    """The rows of one parameter that `rank` owns, where torch's `fully_shard` has cut it between rows.

    fully_shard gives rank r of W the r-th part of ceil(rows / W) rows along the first dimension; the last parts may be
    shorter, or empty. `local` is the memory of these rows here, one after the other.

    An optimizer's vectorised kernel treats the elements behind a tensor's last full vector apart, and in torch's fused
    kernels these get other bits. So the tensor that the optimizer updates begins and ends where a line of `LINE_BYTES`
    of the whole parameter does. Where rows do not, it is a copy with a few more elements around them, which count for
    nothing, and the rows are copied back after every update.
    """

    tensor: nn.Parameter

    def __init__(self, name: str, whole: nn.Parameter, local: Tensor, rank: int, world_size: int) -> None:
        elements, rows = whole.numel(), whole.shape[0]
        self.reach = -(-rows // world_size) * (elements // max(rows, 1))
        """The elements of the first rank's rows, which are the most."""
        start = min(rank * self.reach, elements)
        stop = min(start + self.reach, elements)
        line = LINE_BYTES // whole.element_size()
        begin, end = start, stop
        if begin < end:
            begin, end = begin // line * line, min(-(-end // line) * line, elements)
        self.local = local
        self._is_copy = (begin, end) != (start, stop)
        memory = local.new_zeros(end - begin) if self._is_copy else local
        super().__init__(name, whole, start, stop, nn.Parameter(memory, requires_grad=whole.requires_grad))
        self.inside = slice(start - begin, stop - begin)
        self.take()

    def take(self) -> None:
        """Let the optimizer's tensor have the values of the rows, which were changed elsewhere."""
        if self._is_copy:
            self.tensor.detach()[self.inside] = self.local

    def give(self) -> None:
        """Let the rows have the values of the optimizer's tensor, which were changed by an update."""
        if self._is_copy:
            self.local.copy_(self.tensor.detach()[self.inside])

    def cut_blocks(self, size: int) -> list[int]:
        borders = range(self.reach, self.like.numel(), max(self.reach, 1))
        return sorted({border // size for border in borders if border % size})


@torch.no_grad()
def norm_of_owned(owned: Sequence[Owned], channel: Channel) -> Tensor:
    """The Euclidean norm of the whole gradient: a float64 scalar on the gradients' device, the same on every rank.

    `owned` are those of all trained parameters, in the sequence of `module.parameters()`. A collective of the channel.
    """
    begins = first_blocks(each.like.numel() for each in owned)
    cut = [(number, block) for number, each in enumerate(owned) for block in each.cut_blocks(BLOCK)]
    places = {where: place for place, where in enumerate(cut)}
    both = torch.zeros(begins[-1] + len(cut) * BLOCK, dtype=torch.float64, device=channel.device)
    sums, table = both[: begins[-1]], both[begins[-1] :]
    whole_blocks = []
    for number, each in enumerate(owned):
        if each.tensor is None or each.tensor.grad is None:
            continue
        own, start, stop = each.tensor.grad.view(-1)[each.inside], each.start, each.stop
        for block in each.cut_blocks(BLOCK):
            first, last = max(start, block * BLOCK), min(stop, (block + 1) * BLOCK)
            if first < last:
                at = places[number, block] * BLOCK + first - block * BLOCK
                table[at : at + last - first] = own[first - start : last - start]
        first = -(-start // BLOCK)
        last = stop if stop == each.like.numel() else stop // BLOCK * BLOCK
        if first * BLOCK < last:
            whole_blocks.append((begins[number] + first, own[first * BLOCK - start : last - start]))
    put_block_sums(sums, whole_blocks)
    # One rank at most has a number in each place, and zeros change none.
    channel.sum([both], both, channel.by_parts.world_size)
    numbers = (begins[number] + block for number, block in cut)
    put_block_sums(sums, zip(numbers, table.split(BLOCK), strict=bool(cut)))
    return norm_of(sums)
