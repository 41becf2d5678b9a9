"""What NCCL itself expects of a ring and of a tree, and so which of them it picks: its tuning model.

For each call NCCL estimates the time of every algorithm with every protocol, and takes the lowest (src/graph/tuning.cc
of NCCL 2.30.7; the same in words: github.com/NVIDIA/nccl, issue 457). Here are its estimates of ring and tree with the
protocols LL, LL128 and Simple. Left out are what needs a switch that adds up (CollNet, NVLS), caps on the bandwidth of
one channel, and the extra latency of some network cards.

The exact reduction sends through NCCL, too. So it is charged what these estimates charge a ring with the protocol
Simple: for each call, for each message, and for the plateau.

An estimate is what NCCL decides by, not a measurement: nothing here was checked on GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ddp_lab.projection.costs import Cluster, traffic

Shape = Literal["ring", "tree"]
Protocol = Literal["LL", "LL128", "Simple"]
_PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")
_MICRO = 1e-6

# Microseconds that a call takes, and that each step over a link takes, with each of the three protocols.
_CALL = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
_STEP = {
    ("nvlink", "tree"): (0.6, 1.25, 4.0),
    ("nvlink", "ring"): (0.6, 1.9, 3.4),
    ("pcie", "tree"): (1.0, 1.9, 4.0),
    ("pcie", "ring"): (1.0, 2.5, 5.7),
    ("network", "tree"): (5.0, 8.5, 14.0),
    ("network", "ring"): (2.7, 4.0, 14.0),
}
# A step inside a node of a ring that crosses nodes takes no less than the network card's overhead (AMD hosts).
_OVERHEAD = (2.0, 2.0, 6.0)
# Bytes per second beyond which LL does not go, on one node and between nodes: the lowest of those that NCCL lists.
_LL_INSIDE, _LL_BETWEEN = 39e9, 19e9
# How much of its bandwidth a tree gets, for sizes of 64 B, 128 B, and so on to 256 MB.
_TREE_REACHES = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    "Simple": (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5),
        *(0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
    ),
}
# With so many bytes per rank and channel and more, a ring between nodes has 1.4 times the latency, on GPUs before the
# A100 1.9 times.
_PLATEAU_BYTES, _CHANNELS = 64, 16


@dataclass(frozen=True)
class Choice:
    """An algorithm with a protocol, and the seconds that NCCL expects of it."""

    shape: Shape
    protocol: Protocol
    seconds: float

    @property
    def name(self) -> str:
        """As NCCL writes it: `tree/LL128`."""
        return f"{self.shape}/{self.protocol}"


def choose(size: float, ranks: int, cluster: Cluster, shapes: tuple[Shape, ...] = ("ring", "tree")) -> Choice:
    """The fastest way, by NCCL's estimates, to all-reduce `size` bytes over `ranks` GPUs."""
    # LL128 writes 128 bytes at once without a fence, which NVLink keeps together from the V100 on, and PCIe does not.
    has_ll128 = cluster.inside.medium == "nvlink" and cluster.capability >= 70
    protocols = [protocol for protocol in _PROTOCOLS if protocol != "LL128" or has_ll128]
    return min(
        (
            Choice(shape, protocol, estimate(shape, protocol, size, ranks, cluster))
            for shape in shapes
            for protocol in protocols
        ),
        key=lambda choice: choice.seconds,
    )


def estimate(shape: Shape, protocol: Protocol, size: float, ranks: int, cluster: Cluster) -> float:
    """Seconds that NCCL expects of this algorithm and protocol."""
    if ranks == 1:
        return 0.0
    nodes, local = cluster.split(ranks)
    bandwidth = _bandwidth(shape, protocol, nodes, cluster)
    index = _PROTOCOLS.index(protocol)
    within, across = _steps(shape, index, nodes, local, cluster)
    if shape == "tree":
        latency = _CALL["tree"][index] + 2 * ((local - 1) * within + math.floor(math.log2(nodes)) * across)
        exponent = math.floor(math.log2(size / 64)) if size >= 64 else -1
        reaches = _TREE_REACHES[protocol]
        if 0 <= exponent < len(reaches):
            bandwidth *= reaches[exponent]
        return _MICRO * latency + 2 * size / bandwidth
    steps, crossing = 2 * (ranks - 1), 2 * (nodes - 1)
    latency = _CALL["ring"][index] + (steps - crossing) * within + crossing * across
    if protocol == "Simple":
        latency *= _plateau(size, ranks, nodes, cluster)
    return _MICRO * latency + steps / ranks * size / bandwidth


def exact_seconds(size: float, ranks: int, cluster: Cluster) -> float:
    """Seconds of the exact reduction of `size` bytes, with what NCCL charges a ring with the protocol Simple.

    It sends inside the nodes, then across them, then inside again. Each round is a call, and each message of a rank
    takes a step. Only bytes on links count, not the additions between the rounds.
    """
    if ranks == 1:
        return 0.0
    nodes, local = cluster.split(ranks)
    sent, index = traffic("two levels", nodes, local), _PROTOCOLS.index("Simple")
    rounds = 2 * (local > 1) + min(nodes - 1, 2)
    within, across = _steps("ring", index, nodes, local, cluster)
    latency = rounds * _CALL["ring"][index] + sent.messages_inside * within + sent.messages_across * across
    # The links inside a node are each GPU's own.
    on_links = sent.inside / local * size / cluster.inside.bandwidth + sent.across * size / cluster.between.bandwidth
    return _MICRO * latency * _plateau(size, ranks, nodes, cluster) + on_links


def _steps(shape: Shape, index: int, nodes: int, local: int, cluster: Cluster) -> tuple[float, float]:
    """Microseconds of a step inside a node, and of one between nodes."""
    within = _STEP[cluster.inside.medium, shape][index]
    if shape == "ring" and nodes > 1:
        within = max(within, _OVERHEAD[index])
    # Where every node has one GPU, nothing hides the latency of the network: a tree's counts for the ring, too.
    return within, _STEP["network", "tree" if local == 1 else shape][index]


def _plateau(size: float, ranks: int, nodes: int, cluster: Cluster) -> float:
    if nodes == 1 or size / (_CHANNELS * ranks) < _PLATEAU_BYTES:
        return 1.0
    return 1.9 if cluster.capability < 80 else 1.4


def _bandwidth(shape: Shape, protocol: Protocol, nodes: int, cluster: Cluster) -> float:
    """Bytes per second of the links that are passed, less what the protocol's flags take of them."""
    inside, between = cluster.inside, cluster.between
    bandwidth = inside.bandwidth if nodes == 1 else min(inside.bandwidth, between.bandwidth)
    slowest = _LL_INSIDE if nodes == 1 else _LL_BETWEEN
    if shape == "ring":
        # LL sends as many bytes of flags as of data; LL128 120 bytes of data in 128.
        return {"LL": min(slowest, bandwidth / 2), "LL128": 0.92 * bandwidth, "Simple": bandwidth}[protocol]
    bandwidth *= 0.92
    if protocol == "LL128":
        return bandwidth * (7 / 9 if nodes == 1 else 120 / 128)
    return min(slowest, bandwidth / 3.8) if protocol == "LL" else bandwidth
