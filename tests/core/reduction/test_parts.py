"""Sums of which each rank gets its part, in two levels, on ranks that are threads: the tree's bits, and few bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from ddp_core.base.seeds import share_of
from ddp_core.reduction.exchange import PointToPoint, cut
from ddp_core.reduction.ordered_sum import groups_of
from ddp_core.reduction.parts import Parts, order_of, parts_on
from ddp_core.reduction.strided import RoundSum
from ddp_core.reduction.tree import plan_for
from tests.distributed.level_cases import WORLDS, leaves_of, subtrees
from tests.support.thread_group import ThreadGroup, Wires, at_once, on_threads, use_threads

CPU = torch.device("cpu")
SEVERAL = {name: groups_of(nodes) for name, nodes in WORLDS.items() if groups_of(nodes)}
WAYS = ["messages", "batches", "host memory", "small"]
ELEMENTS = 1024


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way for tensors to travel."""
    way = str(request.param)
    use_threads(monkeypatch, "nccl" if way == "batches" else "gloo")
    monkeypatch.setattr(PointToPoint, "one_round_bytes", 1 << 20 if way == "small" else -1)
    if way == "host memory":
        monkeypatch.setattr("ddp_core.reduction.parts.goes_through_host", lambda *_: True)
    return way


def layouts(groups: tuple[tuple[int, ...], ...]) -> Iterator[list[slice]]:
    """How parts may lie: in the sequence of few messages, in that of the ranks, of unequal size, some empty."""
    size = sum(map(len, groups))
    ranges = cut(ELEMENTS, size, torch.float32)
    order = list(order_of(groups, size))
    yield [ranges[order.index(rank)] for rank in range(size)]
    yield ranges
    borders = [0, *(min(ELEMENTS, 3 + 150 * (rank // 2)) for rank in range(size - 1)), ELEMENTS]
    yield [slice(*pair) for pair in itertools.pairwise(borders)]
    yield [slice(0, 0)] * (size - 1) + [slice(0, ELEMENTS)]


@pytest.mark.parametrize("world", SEVERAL)
def test_each_rank_keeps_the_sum_of_its_own_part_on_nodes_of_any_shape(world: str, way: str) -> None:
    groups = SEVERAL[world]
    size = sum(map(len, groups))

    def wrong(group: Any) -> list[str]:
        parts, found = parts_on(group, groups, CPU), []
        for micro_batches, dtype in ((1, torch.float32), (size, torch.float64), (2 * size + 1, torch.bfloat16)):
            leaves = leaves_of(micro_batches, micro_batches, ELEMENTS, dtype)
            (expected,) = subtrees(leaves, 0, micro_batches)
            share = share_of(micro_batches, group.rank(), size)
            for number, cuts in enumerate(layouts(groups)):
                own = subtrees(leaves, share.start, share.stop)
                (total,) = at_once(parts.fold(own, leaves[0][:0], plan_for(micro_batches, size), cuts))
                if not torch.equal(total, expected[cuts[group.rank()]]):
                    found.append(f"M={micro_batches}, layout {number}")
                # What a rank is given stays, whatever is summed next.
                whole = torch.full_like(expected, torch.nan)
                whole[cuts[group.rank()]] = total
                parts.gather([(whole, cuts), (whole[:0], [slice(0, 0)] * size)])
                if not torch.equal(whole, expected):
                    found.append(f"gathered: M={micro_batches}, layout {number}")
        return found

    assert on_threads(size, wrong) == [[]] * size


def sent(groups: tuple[tuple[int, ...], ...], work: Callable[[Parts], Any]) -> list[tuple[int, int, int]]:
    """Sender, receiver and bytes of all messages of this work on all ranks."""
    wires: list[Wires] = []

    def run(group: ThreadGroup) -> None:
        wires.append(group.wires)
        work(parts_on(group, groups, CPU))  # type: ignore[arg-type]

    on_threads(sum(map(len, groups)), run)
    return wires[0].sent


def outside(messages: Sequence[tuple[int, int, int]], groups: tuple[tuple[int, ...], ...]) -> list[int]:
    """Bytes out of each node."""
    node_of = {rank: node for node, members in enumerate(groups) for rank in members}
    return [
        sum(size for sender, receiver, size in messages if node_of[sender] == node != node_of[receiver])
        for node in range(len(groups))
    ]


@pytest.mark.parametrize("world", ["2 x 2", "3 x 2"])
def test_a_round_sends_one_leaf_out_of_a_node_and_gathering_one_sum(
    world: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch)
    monkeypatch.setattr(PointToPoint, "one_round_bytes", -1)
    groups = SEVERAL[world]
    nodes, size, elements = len(groups), sum(map(len, groups)), 128 * 12

    def push(parts: Parts) -> RoundSum:
        total = RoundSum(parts, elements, torch.empty(0), 2 * size)
        at_once(total.push(torch.ones(elements)))
        at_once(total.push(torch.ones(elements)))
        return total

    once = 4 * elements * (nodes - 1) // nodes
    pushed, gathered = sent(groups, push), sent(groups, lambda parts: push(parts).total())
    assert outside(pushed, groups) == [2 * once] * nodes
    assert outside(gathered, groups) == [3 * once] * nodes
    # One message to each neighbour, and one to the same place on each other node.
    assert len(pushed) == 2 * size * (len(groups[0]) - 1 + nodes - 1)


def test_small_tensors_take_one_level_and_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)
    groups, elements = SEVERAL["2 x 2"], 512

    def cuts_and_messages(limit: float, rounds: int = 1) -> tuple[Any, int]:
        monkeypatch.setattr(PointToPoint, "one_round_bytes", limit)
        found = on_threads(4, lambda group: parts_on(group, groups, CPU).cuts(elements, torch.float32, rounds))
        quarters = cut(elements, 4, torch.float32)
        plan = plan_for(4, 4)
        work = sent(groups, lambda parts: at_once(parts.fold([torch.ones(elements)], torch.empty(0), plan, quarters)))
        return found[0], len(work)

    whole, lanes = [slice(0, elements)] * 4, [slice(0, 256), slice(256, 512)] * 2
    # Two ranks send their leaf to two others: 4 N in place of N/2, and of N/2 for gathering.
    assert cuts_and_messages(3 * 4 * elements)[0] == whole
    assert cuts_and_messages(3 * 4 * elements - 1)[0] == lanes
    # In two rounds, 8 N in place of N, and of N/2.
    assert cuts_and_messages(6.5 * 4 * elements, 2)[0] == whole
    assert cuts_and_messages(6.5 * 4 * elements - 1, 2)[0] == lanes
    # Between two ranks of a lane, two rounds of its half are 2 * N/2 in place of N/2, and of N/4 for sending it back.
    assert cuts_and_messages(4 * elements / 4, 2)[0] == lanes
    two_levels = [slice(0, 128), slice(256, 384), slice(128, 256), slice(384, 512)]
    assert cuts_and_messages(4 * elements / 4 - 1, 2)[0] == two_levels
    # In one level N leave a node in place of N/2, in 3 messages of each rank.
    assert cuts_and_messages(4 * elements / 2)[1] == 4 * 3
    assert cuts_and_messages(4 * elements / 2 - 1)[1] == 4 * (1 + 1)
