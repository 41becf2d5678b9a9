"""The norm of a gradient of which each rank has some rows, with the bits of `ddp_core.reduction.norm`.

The norm is made of blocks of elements, and rows end within blocks. The few blocks that lie on several ranks are put
together first: a table has a place for each of their elements, and each rank fills in its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_core.reduction.communication import Channel
from ddp_core.reduction.norm import norm_of, put_block_sums
from ddp_core.reduction.shards import BLOCK

from .rows import Rows


@torch.no_grad()
def norm_of_rows(rows: Sequence[Rows], channel: Channel, world_size: int) -> Tensor:
    """The Euclidean norm of the whole gradient: a float64 scalar on the gradients' device, the same on every rank.

    `rows` are those of all trained parameters, in the sequence of `module.parameters()`. A collective of the channel.
    """
    begins = [0, *itertools.accumulate(-(-row.shape.numel() // BLOCK) for row in rows)]
    cut = [(number, block) for number, row in enumerate(rows) for block in row.cut_blocks(BLOCK)]
    places = {where: place for place, where in enumerate(cut)}
    both = torch.zeros(begins[-1] + len(cut) * BLOCK, dtype=torch.float64, device=channel.device)
    sums, table = both[: begins[-1]], both[begins[-1] :]
    for number, row in enumerate(rows):
        if row.tensor.grad is None:
            continue
        own = row.of_filled(row.tensor.grad)
        for block in row.cut_blocks(BLOCK):
            first, stop = max(row.start, block * BLOCK), min(row.stop, (block + 1) * BLOCK)
            if first < stop:
                at = places[number, block] * BLOCK + first - block * BLOCK
                table[at : at + stop - first] = own[first - row.start : stop - row.start]
        first = -(-row.start // BLOCK)
        stop = row.stop if row.stop == row.shape.numel() else row.stop // BLOCK * BLOCK
        if first * BLOCK < stop:
            put_block_sums(sums[begins[number] + first :], own[first * BLOCK - row.start : stop - row.start])
    # One rank at most has a number in each place, and zeros change none.
    channel.sum([both], both, world_size)
    for (number, block), elements in zip(cut, table.split(BLOCK), strict=bool(cut)):
        put_block_sums(sums[begins[number] + block :], elements)
    return norm_of(sums)
