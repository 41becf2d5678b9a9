"""Sums of ranks that are threads: the bits of the tree, however tensors travel and wherever they are cut.

Tests reduction/exchange.py, too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ddp_core.base.seeds import share_of
from ddp_core.reduction import OrderedSum
from ddp_core.reduction.exchange import PointToPoint, _backend, exchange_among, exchange_on, goes_through_host
from ddp_core.reduction.ordered_sum import groups_of
from ddp_core.reduction.parts import PartsInOneLevel
from tests.distributed.level_cases import WORLDS, subtrees, wrong_sums
from tests.support.thread_group import ThreadGroup, on_threads, use_threads
from tests.support.wording import refusing

CPU = torch.device("cpu")
WAYS = ["messages", "in pieces", "chunks", "batches", "host memory", "host memory in pieces"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way for tensors to travel."""
    way = str(request.param)
    use_threads(monkeypatch, "nccl" if way == "batches" else "gloo")
    if way != "messages":
        monkeypatch.setattr(PointToPoint, "one_round_bytes", 1 << 20 if "pieces" in way else -1)
        monkeypatch.setattr("ddp_core.reduction.parts._PIECE_ELEMENTS", 64)
    if "host memory" in way:
        monkeypatch.setattr("ddp_core.reduction.parts.goes_through_host", lambda *_: True)
    return way


@pytest.mark.parametrize("world", WORLDS)
def test_sums_over_nodes_of_any_shape_equal_the_tree(world: str, way: str) -> None:
    nodes = WORLDS[world]
    size = sum(map(len, nodes))
    counts = (1, size - 1, size, 2 * size + 1)

    def wrong(group: Any) -> list[str]:
        found = list(wrong_sums(group, nodes, counts, f"{world}, {way}"))
        return found + list(wrong_sums(group, [range(size)], counts, f"{world}, {way}, in one level"))

    assert on_threads(size, wrong) == [[]] * size


def test_a_sum_in_rounds_is_whole_on_every_rank_where_that_sends_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)

    def cuts(group: Any, limit: int) -> Sequence[slice]:
        exchange = PointToPoint(group, range(3))
        exchange.one_round_bytes = limit
        return PartsInOneLevel(exchange).cuts(384, torch.float32, 2)

    # Three ranks, two rounds: whole leaves are 2 * 2 * 384 elements in place of 2 * 2/3 * 384, and save 2/3 * 384.
    extra = 2 * (2 * 2 - 1) * 128 * 4
    for limit, expected in (
        (extra, [slice(0, 384)] * 3),
        (extra - 1, [slice(0, 128), slice(128, 256), slice(256, 384)]),
    ):
        assert on_threads(3, functools.partial(cuts, limit=limit)) == [expected] * 3


def bytes_sent(world_size: int, nodes: Sequence[Sequence[int]], elements: int, micro_batches: int) -> list[int]:
    """The sizes of the messages of rank 0."""
    leaves = torch.ones(micro_batches, elements)

    def sizes(group: Any) -> list[int]:
        share = share_of(micro_batches, group.rank(), world_size)
        OrderedSum(group, nodes)(subtrees(leaves, share.start, share.stop), leaves[0].clone(), micro_batches)
        return [size for sender, _, size in list(group.wires.sent) if sender == 0]

    return on_threads(world_size, sizes)[0]


def test_small_tensors_take_one_round_and_large_ones_two(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)
    whole = 4 * 3840
    # One round sends (W-1) * N elements of each subtree, two rounds (W-1)/W * N of each and of the sum.
    extra = whole * 2 * (1 - 2 / 3)
    monkeypatch.setattr(PointToPoint, "one_round_bytes", extra)
    assert bytes_sent(3, (), 3840, 3) == [whole] * 2
    monkeypatch.setattr(PointToPoint, "one_round_bytes", extra - 1)
    assert bytes_sent(3, (), 3840, 3) == [whole // 3] * 4
    # Between two members with one subtree each, one round sends no more.
    monkeypatch.setattr(PointToPoint, "one_round_bytes", 0)
    assert bytes_sent(2, (), 3840, 2) == [whole]
    # With two subtrees at the most, (W-1) * (2 - 3/W) * N more.
    monkeypatch.setattr(PointToPoint, "one_round_bytes", whole // 2)
    assert bytes_sent(2, (), 3840, 3) == [whole]
    monkeypatch.setattr(PointToPoint, "one_round_bytes", whole // 2 - 1)
    assert bytes_sent(2, (), 3840, 3) == [whole // 2] * 2


def test_two_levels_are_left_out_where_one_round_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)
    assert groups_of([range(16)]) == groups_of([[0], [1]]) == groups_of([]) == ()
    nodes, whole = [[0, 1], [2, 3]], 4 * 3840

    def sent(limit: int) -> list[int]:
        monkeypatch.setattr(PointToPoint, "one_round_bytes", limit)
        return bytes_sent(4, nodes, 3840, 4)

    # Two ranks would send their subtree to two others, not half of it to one and back: that is three subtrees more.
    assert sent(3 * whole) == [whole] * 3
    # Each half is sent to whom it is for, and then to the neighbour; or first to the neighbour, who adds it up.
    assert sent(3 * whole - 1) == sent(whole // 2) == [whole // 2] * 4
    assert sent(whole // 2 - 1) == [whole // 2] * 3
    assert bytes_sent(3, [[0], [1, 2]], 3840, 3) == [whole // 3] * 4, "nodes of unlike sizes have one level"


def test_a_rank_that_brings_other_subtrees_than_its_own_is_refused() -> None:
    with refusing(ValueError):
        OrderedSum(None)([torch.ones(1)] * 2, torch.ones(1), 3)


def test_exchanges_fit_the_backend_and_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_backend_config", {"the group": "cpu:gloo,cuda:nccl"}.get)
    of_devices: Any = "the group"
    assert [_backend(of_devices, torch.device(kind)) for kind in ("cpu", "cuda")] == ["gloo", "nccl"]
    group: Any = ThreadGroup(None, 1, 3)  # type: ignore[arg-type]
    meta = torch.device("meta")
    for backend, device, copied in (("gloo", CPU, False), ("gloo", meta, True), ("other", meta, False)):
        use_threads(monkeypatch, backend)
        among = exchange_among(group, device, [2, 1], tag=6)
        assert goes_through_host(group, device) == copied
        assert isinstance(among, PointToPoint)
        assert (among.rank, among.world_size, among._tag) == (1, 2, 6)
        whole = exchange_on(group, device)
        assert isinstance(whole, PointToPoint)
        assert whole.one_round_bytes == 256 * 1024
    use_threads(monkeypatch, "nccl")
    assert on_threads(2, lambda each: type(exchange_on(each, CPU)).__name__) == ["BatchedMessages"] * 2
    assert type(exchange_among(group, CPU, [2, 1], tag=6)).__name__ == "BatchedMessages"
