"""Trainings across nodes of any shape: the bits of one process, no more bytes out of a node than a ring sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddp_core.reduction import OrderedSum
from tests.distributed import level_cases
from tests.distributed.test_exact_reduction import reference
from tests.support.processes import run_processes
from tests.support.thread_group import Wires, on_threads, use_threads


@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trainings_on_nodes_of_any_shape_end_with_the_digest_of_one_process(thorough: bool) -> None:
    first, *others = run_processes(level_cases.trainings, 6, thorough)
    for (world, name, way), digest in first.items():
        found = {digest, *(other[world, name, way] for other in others)}
        assert found == {reference(name)}, (world, way)


@pytest.mark.parametrize("world", ["2 x 2", "3 x 2"])
def test_sums_in_two_levels_send_out_of_a_node_what_a_ring_sends(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads here. What rounds and parts send: tests/core/reduction/test_parts_on_threads.py."""
    use_threads(monkeypatch)
    nodes, elements = level_cases.WORLDS[world], 3 << 17
    world_size, wires = sum(map(len, nodes)), list[Wires]()

    def add_up(group: Any) -> None:
        leaf = torch.ones(elements)
        OrderedSum(group, nodes)([leaf], leaf, world_size)
        assert leaf[0] == world_size
        wires.append(group.wires)

    on_threads(world_size, add_up)
    sent = [message for message in wires[0].sent if message[2] > 4]  # in the first collective all ranks meet
    half_a_ring = 4 * elements * (len(nodes) - 1) // len(nodes)
    for members in nodes:
        own = [message for message in sent if message[0] in members]
        assert sum(size for _, receiver, size in own if receiver not in members) == 2 * half_a_ring
        assert sum(size for _, receiver, size in own if receiver in members) == 2 * 4 * elements * (len(members) - 1)
        assert len(own) < len(members) * 2 * (world_size - 1)
