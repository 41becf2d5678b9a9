"""How long a step takes when buckets of gradients travel while backward runs.

Forward is a third of the compute time and backward two thirds (a matrix product forward, two backward). Gradients get
ready evenly over backward. DDP packs them into buckets (the first of 1 MB, the others of 25 MB) and sends each as soon
as it is full, one after the other (Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 2020, section 3.2.3). Where a size is asked of DDP (`bucket_cap_mb`), the first is of that size, too.
When backward ends, the step waits for what is still on its way, and for the
slowest rank. The model leaves out data loading, the share of a GPU that NCCL itself takes, and other traffic. So its
efficiencies are upper bounds as far as NCCL's own estimates of its speed hold; where communication decides, they can be
too slow. `forecast` says how far from published runs they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

FORWARD_SHARE = 1 / 3
FIRST_BUCKET, BUCKET = 1024 * 1024, 25 * 1024 * 1024
"""Bytes of DDP's first bucket, and of the others, where no size is asked of it."""


@dataclass(frozen=True)
class Step:
    """Seconds of a step: compute, all communication, its part that is not hidden, and the wait for the slowest rank."""

    compute: float
    communication: float
    exposed: float
    slowest: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.exposed + self.slowest

    @property
    def efficiency(self) -> float:
        """The share of the step that is compute."""
        return self.compute / self.seconds if self.seconds else 1.0


def buckets(gradient_bytes: float, bucket_bytes: float | None = None) -> list[float]:
    """The sizes of DDP's buckets in the order in which they are sent; `bucket_bytes` None: as DDP itself chooses."""
    sizes: list[float] = []
    rest, wanted = gradient_bytes, FIRST_BUCKET if bucket_bytes is None else bucket_bytes
    while rest > 0:
        sizes.append(min(rest, wanted))
        rest -= sizes[-1]
        wanted = bucket_bytes or BUCKET
    return sizes


def step(
    compute: float,
    gradient_bytes: float,
    all_reduce: Callable[[float], float],
    ranks: int,
    bucket_bytes: float | None = None,
    lateness: float = 0.0,
) -> Step:
    """One step; `all_reduce` gives the seconds for a number of bytes.

    `lateness` is how much longer than the mean the slowest of `ranks` is expected to compute, as a share of the mean.
    """
    if ranks == 1:
        return Step(compute, 0.0, 0.0)
    began = FORWARD_SHARE * compute
    ready, free, total = began, began, 0.0
    for size in buckets(gradient_bytes, bucket_bytes):
        ready += (compute - began) * size / gradient_bytes
        seconds = all_reduce(size)
        free = max(ready, free) + seconds
        total += seconds
    return Step(compute, total, max(0.0, free - compute), lateness * compute)
