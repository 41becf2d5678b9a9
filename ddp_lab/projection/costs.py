"""What a collective costs: latency per message, and seconds per byte.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA
19(1), 2005 (ring all-reduce, binomial broadcast); P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full
bandwidth broadcast, reduction and scan", Parallel Computing 35, 2009 (double binary tree); NCCL, src/graph/tuning.cc
(which steps of a ring or tree cross nodes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Collective = Literal["all_reduce", "broadcast", "send"]
Algorithm = Literal["ring", "tree"]


@dataclass(frozen=True)
class Link:
    """Seconds that a message takes before its first byte, and bytes per second and direction after it."""

    name: str
    latency: float
    bandwidth: float
    source: str = ""


def steps_and_shares(collective: Collective, ranks: int) -> tuple[float, float]:
    """Messages one after the other, and how often a tensor's bytes pass a rank's link, as gloo does it.

    Ring all-reduce: 2(p-1) messages, 2(p-1)/p of the tensor. Broadcast: a binomial tree, ceil(log2 p) of each. Sending
    from one rank to each other: p-1 of each.
    """
    if ranks == 1:
        return 0.0, 0.0
    if collective == "all_reduce":
        return 2.0 * (ranks - 1), 2.0 * (ranks - 1) / ranks
    if collective == "broadcast":
        return float(math.ceil(math.log2(ranks))), float(math.ceil(math.log2(ranks)))
    return ranks - 1.0, ranks - 1.0


def busy_ranks(collective: Collective, ranks: int) -> float:
    """How many ranks copy bytes at the same time: all in a ring, the two of a message when one sends after the other.

    A broadcast's p-1 messages spread over its levels.
    """
    if collective == "all_reduce":
        return float(ranks)
    messages, _ = steps_and_shares(collective, ranks)
    return 2.0 * (ranks - 1) / messages if messages else 1.0


def all_reduce_seconds(
    algorithm: Algorithm, size: float, ranks: int, per_node: int, inside: Link, between: Link
) -> float:
    """An all-reduce of `size` bytes over `ranks` GPUs in nodes of `per_node`.

    `between` is what a node has to others, all its adapters together. The bytes go at the pace of the slowest link they
    pass; a ring crosses nodes in 2(nodes-1) of its 2(ranks-1) steps, a double tree goes along a chain inside a node and
    up and down log2(nodes) levels between them.
    """
    if ranks == 1:
        return 0.0
    nodes = math.ceil(ranks / per_node)
    bandwidth = inside.bandwidth if nodes == 1 else min(inside.bandwidth, between.bandwidth)
    if algorithm == "ring":
        crossing = 2 * (nodes - 1)
        latency = (2 * (ranks - 1) - crossing) * inside.latency + crossing * between.latency
        return latency + 2 * (ranks - 1) / ranks * size / bandwidth
    local = min(ranks, per_node)
    latency = 2 * ((local - 1) * inside.latency + math.ceil(math.log2(nodes)) * between.latency)
    return latency + 2 * size / bandwidth
