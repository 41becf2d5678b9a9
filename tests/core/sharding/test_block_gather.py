"""The gathering of a block's parameters alone; tests of fully_shard use it with several ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ddp_core.reduction.parts import Alone
from ddp_core.sharding.block_gather import _Gather, gather_by_messages
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


@pytest.mark.parametrize(("kind", "ranks", "by_messages"), [("cpu", 1, False), ("cpu", 2, True), ("cuda", 2, False)])
def test_ranks_that_exchange_host_memory_gather_by_messages(
    kind: str, ranks: int, by_messages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    given: list[Any] = []
    monkeypatch.setattr("ddp_core.sharding.block_gather.parts_on", lambda *each: asked.append(each))
    parts: Any = [SimpleNamespace(set_custom_all_gather=given.append) for _ in range(2)]
    group: Any = SimpleNamespace(size=lambda: ranks)
    gather_by_messages(parts, group, ((0,), (1,)), torch.device(kind))
    assert asked == [(group, ((0,), (1,)), torch.device(kind))] * by_messages
    assert [type(each) for each in given] == [_Gather] * 2 * by_messages
