"""NCCL's own estimates: beside what real NCCLs printed, and what they pick."""

from __future__ import annotations

import pytest

from ddp_lab.projection import nccl
from ddp_lab.projection.costs import Cluster, Link
from ddp_lab.projection.hardware import GPUS, cluster_of
from ddp_lab.projection.nccl import choose, estimate, exact_seconds

DGX_A100 = cluster_of(GPUS["a100-amp"])
BUCKET = 25 * 2**20


def micro(shape: nccl.Shape, protocol: nccl.Protocol, size: float, ranks: int) -> float:
    """Microseconds on DGX A100s."""
    return 1e6 * estimate(shape, protocol, size, ranks, DGX_A100)


def test_a_ring_between_nodes_as_nccl_printed_it() -> None:
    # github.com/NVIDIA/nccl, issue 1453: 8 GiB over 3 nodes of 8 H100, "Algo 1 proto 2 time 86069.968750"; 16 channels
    # of 12 GB/s.
    nodes = Cluster(8, Link("", 0, 1e12), Link("", 0, 192e9, medium="network"), 90)
    assert 1e6 * estimate("ring", "Simple", 8 * 2**30, 24, nodes) == pytest.approx(86069.968750, rel=0.002)


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
    choice = choose(BUCKET, ranks, DGX_A100)
    assert choice.name == picked
    assert choice.seconds <= min(
        choose(BUCKET, ranks, DGX_A100, ("ring",)).seconds,
        choose(BUCKET, ranks, DGX_A100, ("tree",)).seconds,
    )


@pytest.mark.parametrize(("gpu", "link"), [("v100-fp32", "pcie3"), ("p100-fp32", "nvlink-p100")])
def test_without_nvlink_and_before_the_v100_there_is_no_ll128(gpu: str, link: str) -> None:
    assert choose(BUCKET, 256, cluster_of(GPUS[gpu], link=link, network="50gbit")).protocol != "LL128"


def test_before_the_a100_the_plateau_of_a_ring_is_higher() -> None:
    slow, fast = (estimate("ring", "Simple", BUCKET, 64, cluster_of(GPUS[name])) for name in ("v100-amp", "a100-amp"))
    steps = 8.4 + (126 - 14) * 6.0 + 14 * 14.0
    assert 1e6 * slow == pytest.approx(1.9 * steps + 1e6 * 126 / 64 * BUCKET / 50e9)
    assert 1e6 * fast == pytest.approx(1.4 * steps + 1e6 * 126 / 64 * BUCKET / 200e9)


class TestExact:
    def test_sends_inside_nodes_then_across_them_each_round_a_call(self) -> None:
        # 4 nodes of 8: two rounds of 7 messages and 7/8 of the bytes inside, two of 3 messages and 3/4 across.
        latency = 1.4 * (4 * 8.4 + 14 * 6.0 + 6 * 14.0)
        on_links = 14 / 8 * 1e9 / 240e9 + 6 / 4 * 1e9 / 200e9
        assert exact_seconds(1e9, 32, DGX_A100) == pytest.approx(1e-6 * latency + on_links)
        assert exact_seconds(1e9, 8, DGX_A100) == pytest.approx(1e-6 * (2 * 8.4 + 14 * 3.4) + 14 / 8 * 1e9 / 240e9)
        assert exact_seconds(1e9, 1, DGX_A100) == 0

    @pytest.mark.parametrize("name", sorted(GPUS))
    def test_where_it_sends_what_a_ring_sends_it_costs_what_a_ring_costs_and_one_more_call(self, name: str) -> None:
        for per_node, ranks in ((8, 2), (8, 8), (1, 3), (1, 64)):
            cluster = cluster_of(GPUS[name], per_node)
            call = 8.4e-6 * (1 if per_node > 1 else 1.9 if cluster.capability < 80 else 1.4)
            ring = estimate("ring", "Simple", BUCKET, ranks, cluster)
            assert exact_seconds(BUCKET, ranks, cluster) == pytest.approx(ring + call, rel=1e-9)
