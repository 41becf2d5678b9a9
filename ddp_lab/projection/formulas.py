"""How long a step takes on many ranks: bytes and messages of each reduction, and what backward hides of them.

A message of n bytes takes latency + n / bandwidth (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective
communication operations in MPICH", IJHPCA 19(1), 2005). Forward is a third of the compute time and backward two thirds.
Gradients get ready evenly over backward. DDP packs them into buckets (the first of 1 MB, the others of 25 MB) and sends
each as soon as it is full, one after the other (Li et al., "PyTorch Distributed: Experiences on Accelerating Data
Parallel Training", VLDB 2020, section 3.2.3). When backward ends, the step waits for what is still on its way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

FORWARD_SHARE = 1 / 3
FIRST_BUCKET, BUCKET = 1024 * 1024, 25 * 1024 * 1024
"""Bytes of DDP's first bucket, and of the others."""


@dataclass(frozen=True)
class Link:
    """A link: the seconds before the first byte of a message, and the bytes per second in each direction after it."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Step:
    """Seconds of a step: compute, all communication, and its part that backward does not hide."""

    compute: float
    communication: float
    exposed: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.exposed

    @property
    def efficiency(self) -> float:
        """The share of the step that is compute."""
        return self.compute / self.seconds


def ring_seconds(size: float, ranks: int, per_node: int, inside: Link, between: Link) -> float:
    """Seconds of a ring all-reduce of `size` bytes over `ranks` ranks in nodes of `per_node`.

    `between` is a node's link to the other nodes, all its adapters together. The bytes go at the pace of the slowest
    link that they pass, and 2(nodes-1) of the 2(ranks-1) steps cross nodes.
    """
    nodes = math.ceil(ranks / per_node)
    bandwidth = inside.bandwidth if nodes == 1 else min(inside.bandwidth, between.bandwidth)
    crossing = 2 * (nodes - 1)
    latency = (2 * (ranks - 1) - crossing) * inside.latency + crossing * between.latency
    return latency + 2 * (ranks - 1) / ranks * size / bandwidth


def exact_seconds(size: float, ranks: int, per_node: int, inside: Link, between: Link) -> float:
    """Seconds of the exact reduction of `size` bytes; as for `ring_seconds`. Its additions are not counted.

    The ranks of a node add up first, 2(local-1) messages and 2(local-1)/local tensors of each; then one tensor per node
    is exchanged, two nodes in one round and more of them in two.
    """
    nodes, local = math.ceil(ranks / per_node), min(ranks, per_node)
    messages = (1 if nodes == 2 else 2) * (nodes - 1)
    in_nodes = 2 * (local - 1) * (inside.latency + size / local / inside.bandwidth)
    return in_nodes + messages * between.latency + 2 * (nodes - 1) / nodes * size / between.bandwidth


def buckets(gradient_bytes: float) -> list[float]:
    """The sizes of DDP's buckets in the order in which they are sent."""
    sizes: list[float] = []
    rest = gradient_bytes
    while rest > 0:
        sizes.append(min(rest, BUCKET if sizes else FIRST_BUCKET))
        rest -= sizes[-1]
    return sizes


def step(compute: float, gradient_bytes: float, all_reduce: Callable[[float], float]) -> Step:
    """One step whose buckets are sent while backward runs; `all_reduce` gives the seconds for a number of bytes."""
    began = FORWARD_SHARE * compute
    ready, free, total = began, began, 0.0
    for size in buckets(gradient_bytes):
        ready += (compute - began) * size / gradient_bytes
        seconds = all_reduce(size)
        free = max(ready, free) + seconds
        total += seconds
    return Step(compute, total, max(0.0, free - compute))
