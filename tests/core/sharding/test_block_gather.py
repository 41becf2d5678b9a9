"""Parameters in host memory are gathered by messages: in gloo's ring each part would pass through every other rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_core.sharding.block_gather import _Gather, gather_by_messages


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
