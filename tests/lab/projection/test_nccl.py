"""NCCL's own estimates: beside what real NCCLs printed, and what they pick."""

from __future__ import annotations

import pytest

from ddp_lab.projection import nccl
from ddp_lab.projection.costs import Link
from ddp_lab.projection.hardware import LINKS, NETWORKS
from ddp_lab.projection.nccl import choose, estimate

INSIDE, BETWEEN = LINKS["nvlink-a100"], NETWORKS["1600gbit"]
BUCKET = 25 * 2**20


def micro(shape: nccl.Shape, protocol: nccl.Protocol, size: float, ranks: int, per_node: int = 8) -> float:
    """Microseconds on DGX A100s."""
    return 1e6 * estimate(shape, protocol, size, ranks, per_node, INSIDE, BETWEEN)


def test_a_ring_between_nodes_as_nccl_printed_it() -> None:
    # github.com/NVIDIA/nccl, issue 1453: 8 GiB over 3 nodes of 8 H100, "Algo 1 proto 2 time 86069.968750"; 16 channels
    # of 12 GB/s.
    links = Link("", 0, 1e12), Link("", 0, 192e9, medium="network")
    assert 1e6 * estimate("ring", "Simple", 8 * 2**30, 24, 8, *links) == pytest.approx(86069.968750, rel=0.002)


def test_steps_of_a_ring_over_the_network_as_nccl_printed_them() -> None:
    # github.com/NVIDIA/nccl, issue 1304: a broadcast over 1024 ranks, "Algo 1 proto 0 time 2771.401367": 1024 steps.
    assert nccl._CALL["ring"][0] + 1024 * nccl._STEP["network", "ring"][0] == pytest.approx(2771.4, abs=0.01)


def test_latency_of_a_ring_grows_with_the_ranks_that_of_a_tree_with_the_logarithm_of_the_nodes() -> None:
    assert micro("ring", "LL", 0, 64) == pytest.approx(6.6 + (126 - 14) * 2.0 + 14 * 2.7)
    assert micro("tree", "LL", 0, 64) == pytest.approx(6.8 + 2 * (7 * 0.6 + 3 * 5.0))
    assert micro("tree", "LL", 0, 4096) == pytest.approx(6.8 + 2 * (7 * 0.6 + 9 * 5.0))


def test_bytes_of_a_ring_on_one_node() -> None:
    assert micro("ring", "Simple", 1e9, 8) == pytest.approx(8.4 + 14 * 3.4 + 1e6 * 14 / 8 * 1e9 / 240e9)


def test_a_tree_sends_twice_the_bytes_with_what_its_correction_leaves() -> None:
    # 32 MiB are 64 B times 2^19: 0.7 of 0.92 of the bandwidth.
    expected = 8.4 + 2 * (7 * 4.0 + 14.0) + 1e6 * 2 * 2**25 / (0.92 * 0.7 * 200e9)
    assert micro("tree", "Simple", 2**25, 16) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ranks", "picked"), [(8, "ring/Simple"), (16, "ring/LL128"), (64, "tree/LL128"), (4096, "tree/LL128")]
)
def test_the_fastest_is_picked(ranks: int, picked: str) -> None:
    choice = choose(BUCKET, ranks, 8, INSIDE, BETWEEN)
    assert choice.name == picked
    assert choice.seconds <= min(
        choose(BUCKET, ranks, 8, INSIDE, BETWEEN, ("ring",)).seconds,
        choose(BUCKET, ranks, 8, INSIDE, BETWEEN, ("tree",)).seconds,
    )


def test_without_nvlink_there_is_no_ll128() -> None:
    assert choose(BUCKET, 256, 8, LINKS["pcie3"], NETWORKS["50gbit"]).protocol != "LL128"


def test_one_rank_needs_nothing() -> None:
    assert micro("ring", "LL", 1e9, 1) == 0
