"""The sum in rounds: the bits of the tree, on any number of ranks, with few sums kept; ranks are threads here."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_core.reduction.exchange import PointToPoint
from ddp_core.reduction.parts import parts_on
from ddp_core.reduction.strided import RoundSum
from tests.distributed.level_cases import leaves_of, subtrees
from tests.support.thread_group import at_once, on_threads, use_threads

ELEMENTS = 1300


def sums_on_rank(of_counts: dict[int, Tensor], groups: tuple[tuple[int, ...], ...], group: Any) -> list[Tensor]:
    """The total of each number of micro-batches."""
    parts, found = parts_on(group, groups, torch.device("cpu")), []
    for micro_batches, leaves in of_counts.items():
        total = RoundSum(parts, ELEMENTS, leaves[0], micro_batches)
        for first in range(0, micro_batches, parts.world_size):
            has_leaf = first + parts.rank < micro_batches
            at_once(total.push(leaves[first + parts.rank].clone() if has_leaf else None))
            assert len(total._subtrees) <= math.log2(micro_batches) + 1
        found.append(total.total())
    return found


@pytest.mark.parametrize("one_round_bytes", [-1, 1 << 20], ids=["in parts", "whole"])
@pytest.mark.parametrize("world_size", range(2, 9))
def test_rounds_of_any_width_give_the_bits_of_the_tree(
    world_size: int, one_round_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch)
    monkeypatch.setattr(PointToPoint, "one_round_bytes", one_round_bytes)
    leaves = {count: leaves_of(count, count, ELEMENTS, torch.float32) for count in range(1, 13)}
    halves = (tuple(range(world_size // 2)), tuple(range(world_size // 2, world_size)))
    for groups in ((), halves):
        for found in on_threads(world_size, functools.partial(sums_on_rank, leaves, groups)):
            for total, each in zip(found, leaves.values(), strict=True):
                assert torch.equal(total, subtrees(each, 0, len(each))[0])
