"""The norm of a gradient of which each rank has a part, with the bits of `ddp_core.reduction.norm`.

The norm is made of blocks of elements, and a rank's rows may end within a block. The few blocks that lie on several
ranks are put together first: a table has a place for each of their elements, and each rank fills in its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_core.reduction.communication import Channel
from ddp_core.reduction.norm import BLOCK, first_blocks, norm_of, put_block_sums

from .owned import Owned


@torch.no_grad()
def norm_of_owned(owned: Sequence[Owned], channel: Channel, world_size: int) -> Tensor:
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
    channel.sum([both], both, world_size)
    numbers = (begins[number] + block for number, block in cut)
    put_block_sums(sums, zip(numbers, table.split(BLOCK), strict=bool(cut)))
    return norm_of(sums)
