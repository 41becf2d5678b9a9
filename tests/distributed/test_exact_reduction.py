"""Exact reduction in real processes: one digest whatever the world size, and clear errors when something fails.

Tests reduction/strided.py, too.
"""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_core.reduction import OrderedSum
from tests.distributed import exact_cases as cases
from tests.distributed import level_cases
from tests.support.processes import run_processes
from tests.support.thread_group import Wires, on_threads, use_threads

DOCS = Path(__file__).parents[2] / "docs"
EXPLANATION = DOCS / "explanation" / "exact-reduction.md"
HOW_TO = DOCS / "how-to" / "use-one-part.md"
WORLD_SIZES = [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 4, 5, 6, 7, 8))]


@functools.cache
def results(world_size: int) -> list[dict]:
    """The results of all cases on `world_size` ranks; they run once."""
    return run_processes(cases.everything, world_size)


@functools.cache
def reference() -> dict[str, str]:
    """The digest of each case in one process without a process group."""
    (result,) = run_processes(cases.everything_on_one_process, 1)
    return result


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("way", cases.WAYS)
@pytest.mark.parametrize("name", cases.TRAININGS)
def test_a_training_ends_with_one_digest_on_every_world_size(name: str, way: str, world_size: int) -> None:
    assert {result["digests"][name, way] for result in results(world_size)} == {reference()[name]}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_missing_gradient_leaves_even_the_sign_of_a_zero(world_size: int) -> None:
    for number, present in enumerate(cases.ZEROS):
        assert cases.zero_signs(0, present) == {"alone": [-1.0] * 3}
        for result in results(world_size):
            signs = result["zeros"][number]
            assert signs == dict.fromkeys(signs, [-1.0] * 3), f"gradients in the micro-batches {present} alone"


@pytest.mark.parametrize(
    ("where", "shares", "nodes", "is_cut"),
    [
        *itertools.product(("forward", "between backwards", "exchange"), ("contiguous", "strided"), (1,), (False,)),
        ("exchange", "contiguous", 2, False),
        *(
            pytest.param(where, shares, 1, True, marks=pytest.mark.slow)
            for where, shares in (("between backwards", "strided"), ("exchange", "contiguous"), ("exchange", "strided"))
        ),
    ],
)
def test_an_error_on_one_rank_ends_every_rank(where: str, shares: str, nodes: int, is_cut: bool) -> None:
    messages = run_processes(cases.fail_on_one_rank, 3, where, shares, nodes, is_cut)
    assert all(messages), messages
    assert "on purpose" in messages[1]


def test_a_parameter_that_no_rank_has_a_gradient_for_in_any_later_step_is_named_on_all() -> None:
    messages = run_processes(cases.give_no_gradient_in_a_later_step, 2)
    assert all(each.startswith("step 3: backward came by weight and gave it no gradient") for each in messages)


@pytest.mark.full
def test_the_documents_loop_prints_one_digest_alone_and_on_three_ranks() -> None:
    pages = (EXPLANATION.read_text(), HOW_TO.read_text())
    (sums,), parts = (re.findall(r"```python\n(.*?)```", page, re.DOTALL) for page in pages)
    (loop,) = (part for part in parts if "hashlib" in part)
    exec(compile(sums, EXPLANATION.name, "exec"), {})
    alone = run_processes(cases.run_document, 1, loop, False)
    three = run_processes(cases.run_document, 3, loop, True)
    assert len(alone[0].strip()) == 64
    assert three == alone * 3


@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trainings_on_nodes_of_any_shape_end_with_the_digest_of_one_process(thorough: bool) -> None:
    first, *others = run_processes(level_cases.trainings, 6, thorough)
    for (world, name, way), digest in first.items():
        found = {digest, *(other[world, name, way] for other in others)}
        assert found == {reference()[name]}, (world, way)


@pytest.mark.parametrize("world", ["2 x 2", "3 x 2"])
def test_sums_in_two_levels_send_out_of_a_node_what_a_ring_sends(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads here. What rounds and parts send: tests/core/reduction/test_parts.py."""
    use_threads(monkeypatch)
    nodes, elements = level_cases.WORLDS[world], 3 << 17
    world_size, wires = sum(map(len, nodes)), list[Wires]()

    def add_up(group: Any) -> None:
        leaf = torch.ones(elements)
        OrderedSum(group, nodes)([leaf], leaf, world_size)
        assert leaf[0] == world_size
        wires.append(group.wires)

    on_threads(world_size, add_up)
    sent = wires[0].sent
    half_a_ring = 4 * elements * (len(nodes) - 1) // len(nodes)
    for members in nodes:
        own = [message for message in sent if message[0] in members]
        assert sum(size for _, receiver, size in own if receiver not in members) == 2 * half_a_ring
        assert sum(size for _, receiver, size in own if receiver in members) == 2 * 4 * elements * (len(members) - 1)
        assert len(own) < len(members) * 2 * (world_size - 1)
