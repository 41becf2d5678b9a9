"""The gradients that fully_shard hands over, and those that are missing among them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddp_core.sharding import block_parcel
from ddp_core.sharding.block_parcel import BlockParcel, UnreadMemory


class Part:
    """As much of a module of fully_shard as a parcel uses."""

    def set_custom_reduce_scatter(self, handover: Any) -> None:
        self.handover = handover

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("set_")
        return lambda *_, **__: None


def test_a_missing_gradient_is_the_zero_that_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    part: Any = Part()
    used, unused = (nn.Parameter(torch.ones(2)) for _ in range(2))
    monkeypatch.setattr(block_parcel, "sent_together", lambda _: [(used, used), (unused, unused)])
    rows: Any = {id(one): SimpleNamespace(name="weight", reach=1, local=one.detach()[:1]) for one in (used, unused)}
    parcel = BlockParcel(part, rows, 2, UnreadMemory())
    parcel.became_ready = lambda: None
    parcel.open()
    used.sum().backward()
    # Two ranks have a row of either; fully_shard writes +0.0 for the gradient that is missing.
    part.handover(torch.empty(2), torch.tensor([0.0, 0.0, 0.0, 0.0]))
    flat, present = parcel.take()
    assert flat is not None
    assert torch.copysign(torch.ones(4), flat).tolist() == [1.0, -1.0, 1.0, -1.0]
    assert present == [True, False]
