"""The ordered sum across nodes: the same bits as in one process, and no more bytes out of a node than a ring sends."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.distributed import level_cases
from tests.distributed.test_exact_reduction import reference
from tests.support.processes import run_processes

EXTENTS = [False, pytest.param(True, marks=pytest.mark.slow)]


@functools.cache
def results(thorough: bool) -> list[dict[str, Any]]:
    """The results of the cases on six ranks; they run once."""
    return run_processes(level_cases.everything, 6, thorough)


@pytest.mark.parametrize("thorough", EXTENTS)
def test_sums_over_nodes_of_any_shape_equal_the_tree_of_one_process(thorough: bool) -> None:
    assert [result["wrong"] for result in results(thorough)] == [[]] * 6


@pytest.mark.parametrize("thorough", EXTENTS)
def test_trainings_on_nodes_of_any_shape_end_with_the_digest_of_one_process(thorough: bool) -> None:
    for (world, name), digest in results(thorough)[0]["digests"].items():
        assert {digest, *(result["digests"][world, name] for result in results(thorough))} == {reference(name)}, world


def test_no_communication_thread_is_left() -> None:
    assert [result["threads"] for result in results(False)] == [[]] * 6


@pytest.mark.parametrize("world", ["2 x 2", "3 x 2"])
def test_a_sum_in_two_levels_sends_out_of_a_node_what_a_ring_sends(world: str) -> None:
    nodes, elements = level_cases.WORLDS[world], 1 << 18
    world_size = sum(map(len, nodes))
    sent = run_processes(level_cases.bytes_sent, world_size, nodes, elements)
    ring = 2 * 4 * elements * (len(nodes) - 1) / len(nodes)
    for members in nodes:
        assert sum(sent[rank]["outside"] for rank in members) <= 1.01 * ring
    inside = 2 * 4 * elements * (len(nodes[0]) - 1) / len(nodes[0])
    assert all(one["inside"] <= 1.01 * inside for one in sent)
    assert all(one["messages"] < 2 * (world_size - 1) for one in sent)
