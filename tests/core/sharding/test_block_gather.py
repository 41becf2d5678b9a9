"""The gathering of a block's parameters alone; tests of fully_shard use it with several ranks."""

from __future__ import annotations

from typing import Any, cast

import torch

from ddp_core.reduction.parts import Alone
from ddp_core.sharding.block_gather import _Gather
from tests.support.thread_group import on_threads


def test_a_part_that_lies_elsewhere_is_put_in_its_place() -> None:
    def gather(group: Any) -> list[float]:
        out, part = torch.zeros(2), torch.tensor([3.0, 4.0])
        _Gather(Alone())(out, part, group)
        return out.tolist()

    assert on_threads(1, gather) == [[3.0, 4.0]]


def test_memory_for_all_parts_has_the_asked_dtype() -> None:
    memory = _Gather(cast(Any, None)).allocate([2, 3], dtype=torch.float64, device=torch.device("cpu"))
    assert (memory.shape, memory.dtype) == ((2, 3), torch.float64)
