"""What a collective costs: latency per message, and seconds per byte.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA
19(1), 2005 (ring all-reduce, binomial broadcast). What the exact reduction sends:
ddp_core/reduction/ordered_sum.py. `counting` counts the messages of a ring and of a tree; `nccl` has what NCCL expects
of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Collective = Literal["all_reduce", "broadcast", "send"]
Medium = Literal["nvlink", "pcie", "network"]
Way = Literal["all_reduce", "one level", "two levels"]
"""What benchmarks/nodes.py compares: gloo's ring, and the exact reduction without and with regard to nodes."""


@dataclass(frozen=True)
class Link:
    """A link: the seconds before the first byte of a message, and the bytes per second in each direction after it."""

    name: str
    latency: float
    bandwidth: float
    source: str = ""
    medium: Medium = "nvlink"


@dataclass(frozen=True)
class Cluster:
    """Nodes that are alike: `per_node` GPUs of one compute capability (70, 80 …) on the link `inside`.

    `between` is a node's link to the other nodes, all its adapters together.
    """

    per_node: int
    inside: Link
    between: Link
    capability: int

    def split(self, ranks: int) -> tuple[int, int]:
        """The nodes that so many ranks need, and the ranks of each."""
        return math.ceil(ranks / self.per_node), min(ranks, self.per_node)


def steps_and_shares(collective: Collective, ranks: int) -> tuple[float, float]:
    """How many messages follow one another, and how often a tensor's bytes pass a rank's link, with gloo's algorithms.

    Ring all-reduce: 2(p-1) messages, 2(p-1)/p of the tensor. Broadcast in a binomial tree: ceil(log2 p) messages, each
    the whole tensor. Sends from one rank to every other: p-1 messages, each the whole tensor.
    """
    if ranks == 1:
        return 0.0, 0.0
    if collective == "all_reduce":
        return 2.0 * (ranks - 1), 2.0 * (ranks - 1) / ranks
    if collective == "broadcast":
        return float(math.ceil(math.log2(ranks))), float(math.ceil(math.log2(ranks)))
    return ranks - 1.0, ranks - 1.0


def busy_ranks(collective: Collective, ranks: int) -> float:
    """How many ranks copy bytes at the same time: all in a ring, two where one message follows another.

    The p-1 messages of a broadcast are spread over the levels of its tree; the result is the mean over the levels.
    """
    if collective == "all_reduce":
        return float(ranks)
    messages, _ = steps_and_shares(collective, ranks)
    return 2.0 * (ranks - 1) / messages if messages else 1.0


@dataclass(frozen=True)
class Traffic:
    """What an all-reduce sends: bytes out of one node and between its ranks, per byte of the tensor, and messages.

    Bytes `across` pass the link that the ranks of a node share. Messages are those that follow one another in a ring,
    and what each rank sends in the other ways.
    """

    across: float
    inside: float
    messages_across: int
    messages_inside: int


def traffic(way: Way, nodes: int, per_node: int) -> Traffic:
    """The traffic of nodes of `per_node` ranks.

    A ring crosses a node's link once, whatever the number of ranks. In one level every rank exchanges its part with
    every other. In two levels the ranks of a node add up first, so that one tensor per node is left to exchange.
    """
    ranks = nodes * per_node
    if way == "all_reduce":
        share, crossing = 2 * (ranks - 1) / ranks, nodes > 1
        across = 2 * (nodes - 1)
        return Traffic(share * crossing, share * (per_node - crossing), across, 2 * (ranks - 1) - across)
    others, fellows = ranks - per_node, per_node - 1
    if way == "one level":
        share = 2 * per_node / ranks
        return Traffic(share * others, share * fellows, 2 * others, 2 * fellows)
    # Two members exchange their tensors in one round, more of them in two.
    rounds = 1 if nodes == 2 else 2
    return Traffic(2 * (nodes - 1) / nodes, 2.0 * fellows, rounds * (nodes - 1), 2 * fellows)


def ring_seconds(size: float, ranks: int, per_node: int, inside: Link, between: Link) -> float:
    """Seconds of a ring all-reduce of `size` bytes over `ranks` ranks in nodes of `per_node`.

    `between` is a node's link to the other nodes, all its adapters together. The bytes go at the pace of the slowest
    link that they pass, and 2(nodes-1) of the 2(ranks-1) steps cross nodes.
    """
    if ranks == 1:
        return 0.0
    nodes = math.ceil(ranks / per_node)
    bandwidth = inside.bandwidth if nodes == 1 else min(inside.bandwidth, between.bandwidth)
    crossing = 2 * (nodes - 1)
    latency = (2 * (ranks - 1) - crossing) * inside.latency + crossing * between.latency
    return latency + 2 * (ranks - 1) / ranks * size / bandwidth
