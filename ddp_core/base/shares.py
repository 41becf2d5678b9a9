"""Which rank or replica computes which micro-batches of a step: one rule for all layouts."""

from __future__ import annotations


def share_of(count: int, rank: int, world_size: int) -> range:
    """The numbers below `count` that belong to `rank`: contiguous, in rank order, sizes differing by one at most.

    With `count` below `world_size` some ranks get an empty range.
    """
    return range(rank * count // world_size, (rank + 1) * count // world_size)
