"""Trainings across nodes of any shape: the bits of one process, no more bytes out of a node than a ring sends."""

from __future__ import annotations

import pytest

from tests.distributed import level_cases
from tests.distributed.test_exact_reduction import reference
from tests.support.processes import run_processes


@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trainings_on_nodes_of_any_shape_end_with_the_digest_of_one_process(thorough: bool) -> None:
    first, *others = run_processes(level_cases.trainings, 6, thorough)
    for (world, name, way), digest in first.items():
        found = {digest, *(other[world, name, way] for other in others)}
        assert found == {reference(name)}, (world, way)


@pytest.mark.full
@pytest.mark.parametrize("world", ["2 x 2", "3 x 2"])
def test_sums_in_two_levels_send_out_of_a_node_what_a_ring_sends(world: str) -> None:
    nodes, elements = level_cases.WORLDS[world], 3 << 17
    world_size = sum(map(len, nodes))
    sent = run_processes(level_cases.bytes_sent, world_size, nodes, elements)
    half_a_ring = 4 * elements * (len(nodes) - 1) / len(nodes)
    # Two rounds, then the sums; with pieces the parameters instead.
    halves = {"sum": 2, "strided": 3, "pieces, contiguous": 2, "pieces, strided": 3}
    for work, count in halves.items():
        outside = [sum(sent[rank][work]["outside"] for rank in members) for members in nodes]
        assert max(outside) <= 1.01 * count * half_a_ring, work
        assert min(outside) >= 0.99 * count * half_a_ring, work
    inside = 2 * 4 * elements * (len(nodes[0]) - 1) / len(nodes[0])
    assert all(one["sum"]["inside"] <= 1.01 * inside for one in sent)
    assert all(one["sum"]["messages"] < 2 * (world_size - 1) for one in sent)
