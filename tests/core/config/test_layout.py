"""Layouts: which are allowed, and that the cut of a global batch depends on the experiment alone.

Tests config/cut.py, too.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_core.base.errors import UserError
from ddp_core.config.cut import BatchCut
from ddp_core.config.experiment import Component, Experiment
from ddp_core.config.layout import Layout, ShardMode
from tests.support.wording import refusing


def experiment(**fields: Any) -> Experiment:
    return Experiment(name="mine", model=Component(name="mlp"), data=Component(name="digits"), **fields)


@pytest.mark.parametrize(
    ("layout", "label", "shares", "world_size"),
    [
        (Layout(), "single-cpu", 1, 1),
        (Layout(device="cuda"), "single-cuda", 1, 1),
        (Layout(kind="dp", nproc_per_node=3), "dp-3-cpu", 3, 1),
        (Layout(kind="ddp", nproc_per_node=4, device="cuda"), "ddp-1x4-cuda", 4, 4),
        (Layout(kind="ddp", nnodes=2, nproc_per_node=2), "ddp-2x2-cpu", 4, 4),
        (Layout(kind="ddp", nproc_per_node=2, shard="optimizer"), "ddp-1x2-cpu-shard-optimizer", 2, 2),
        (Layout(kind="ddp", nproc_per_node=2, dealt=(3, 1)), "ddp-1x2-cpu-shares-uneven", 2, 2),
        (Layout(kind="ddp", nproc_per_node=2, dealt="auto"), "ddp-1x2-cpu-shares-auto", 2, 2),
    ],
)
def test_a_layout_says_who_takes_a_share(layout: Layout, label: str, shares: int, world_size: int) -> None:
    layout.check()
    assert (layout.label, layout.shares, layout.world_size) == (label, shares, world_size)
    assert Layout.model_validate(layout.model_dump()) == layout


@pytest.mark.parametrize(
    "layout",
    [
        Layout(kind="single", nproc_per_node=2),
        Layout(kind="single", nnodes=2),
        Layout(kind="dp", nnodes=2),
        Layout(shard="optimizer"),
        Layout(kind="dp", shard="gradients"),
        Layout(kind="dp", nproc_per_node=2, dealt=(3, 1)),
        Layout(kind="ddp", nproc_per_node=2, shard="optimizer", dealt="auto"),
        Layout(kind="ddp", nproc_per_node=3, dealt=(3, 1)),
    ],
    ids=[
        *("processes of one", "nodes of one", "nodes of dp", "shards of one", "shards of dp"),
        *("shares of dp", "shares and shards", "a share too few"),
    ],
)
def test_a_contradiction_is_named(layout: Layout) -> None:
    with refusing():
        layout.check()


SHARES = st.integers(1, 12)


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(1, 12), SHARES, st.booleans(), st.data())
def test_shares_cover_every_micro_batch_once_and_are_even_and_those_in_a_row_in_order(
    micro_batch: int, count: int, shares: int, is_strided: bool, data: st.DataObject
) -> None:
    size = micro_batch * count
    samples = data.draw(st.integers(1, size))
    cut = BatchCut(size, micro_batch, shares, is_strided)
    dealt = [cut.share(share, samples) for share in range(shares)]
    parts = [part for share in dealt for part in share]
    assert sorted(part.index for part in parts) == list(range(cut.count(samples)))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert max(len(cut.share(share, size)) for share in range(shares)) == cut.accumulation_steps
    parts = sorted(parts, key=lambda part: part.index) if is_strided else parts
    assert [number for part in parts for number in range(part.start, part.stop)] == list(range(samples))
    assert all(part.stop - part.start == micro_batch for part in parts[:-1])
    assert parts == cut.parts(samples) == BatchCut(size, micro_batch, 1).share(0, samples), "a layout changes none"


@settings(deadline=None)
@given(st.integers(1, 200), SHARES)
def test_without_micro_batch_each_takes_an_equal_share_or_the_nearest_sizes_are_named(size: int, shares: int) -> None:
    layout = Layout(kind="ddp", nproc_per_node=shares)
    if size % shares == 0:
        cut = BatchCut.of(experiment(global_batch_size=size), layout)
        assert (cut.micro_batches, cut.micro_batch) == (shares, size // shares)
        return
    with pytest.raises(UserError) as raised:
        BatchCut.of(experiment(global_batch_size=size), layout)
    below, above = size // shares * shares, (size // shares + 1) * shares
    assert all(str(number) in str(raised.value) for number in (below, above) if number)
    assert f"--set global_batch_size={above}" in str(raised.value)


def test_more_ranks_than_micro_batches_is_an_error_with_both_ways_out() -> None:
    given = experiment(global_batch_size=16, micro_batch=4)
    assert BatchCut.of(given, Layout(kind="ddp", nproc_per_node=4)).accumulation_steps == 1
    with refusing():
        BatchCut.of(given, Layout(kind="ddp", nproc_per_node=5))
    with refusing():
        BatchCut.of(given, Layout(kind="dp", nproc_per_node=5))


def test_the_batch_arithmetic_is_said() -> None:
    cut = BatchCut.of(experiment(global_batch_size=64, micro_batch=8), Layout(kind="ddp", nproc_per_node=3))
    assert cut.describe() == "global batch 64 = 8 micro-batches x 8 samples, 3 per step on each of 3"
    uneven = BatchCut.of(
        experiment(global_batch_size=64, micro_batch=8), Layout(kind="ddp", nproc_per_node=2, dealt=(3, 1))
    )
    assert uneven.describe() == "global batch 64 = 8 micro-batches x 8 samples, 6 + 2 per step on the ranks"
    assert uneven.accumulation_steps == 6


@pytest.mark.parametrize(
    ("shard", "is_strided"), [("none", False), ("optimizer", False), ("gradients", True), ("parameters", True)]
)
def test_micro_batches_are_dealt_in_turns_where_gradients_are_sharded(shard: ShardMode, is_strided: bool) -> None:
    layout = Layout(kind="ddp", nproc_per_node=2, shard=shard)
    cut = BatchCut.of(experiment(global_batch_size=16, micro_batch=4), layout)
    assert [part.index for part in cut.share(1, 16)] == ([1, 3] if is_strided else [2, 3])
    assert cut.describe().endswith("2 per step on each of 2" + (", in turns" if is_strided else ""))
