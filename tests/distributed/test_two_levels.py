"""The ordered sum across nodes: the same bits as in one process, and no more bytes out of a node than a ring sends."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.distributed import level_cases, sharded_level_cases
from tests.distributed.test_exact_reduction import reference
from tests.support.processes import run_processes

EXTENTS = [False, pytest.param(True, marks=pytest.mark.slow)]


@functools.cache
def results(thorough: bool) -> list[dict[str, Any]]:
    """The results of the cases on six ranks; they run once."""
    return run_processes(level_cases.everything, 6, thorough)


@pytest.mark.full
@pytest.mark.parametrize("thorough", EXTENTS)
def test_sums_over_nodes_of_any_shape_equal_the_tree_of_one_process(thorough: bool) -> None:
    assert [result["wrong"] for result in results(thorough)] == [[]] * 6


@pytest.mark.parametrize("thorough", EXTENTS)
def test_trainings_on_nodes_of_any_shape_end_with_the_digest_of_one_process(thorough: bool) -> None:
    for (world, name, way), digest in results(thorough)[0]["digests"].items():
        found = {digest, *(result["digests"][world, name, way] for result in results(thorough))}
        assert found == {reference(name)}, (world, way)


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "thorough"),
    [("1 + 2", False), *(pytest.param(world, True, marks=pytest.mark.slow) for world in ("2 x 2", "3 + 1 + 2"))],
)
def test_trainings_with_shards_on_nodes_end_with_the_digests_of_one_process(world: str, thorough: bool) -> None:
    size = sum(map(len, level_cases.WORLDS[world]))
    first, *others = run_processes(sharded_level_cases.with_shards, size, world, thorough)
    for name, (expected, *found) in first.items():
        assert found == [expected] * len(found), name
        # The optimizer's state is whole on rank 0 alone, and so are rows.
        of_others = ["None"] if name.startswith("rows") else [weights for weights, _ in found]
        assert all(other[name] == of_others for other in others), name


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
