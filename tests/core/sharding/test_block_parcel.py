"""The gradients that fully_shard hands over, and those that are missing among them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddp_core.sharding import block_parcel
from ddp_core.sharding.block_parcel import BlockParcel, UnreadMemory
from tests.support.wording import refusing


class Part:
    """As much of a module of fully_shard as a parcel uses."""

    def set_custom_reduce_scatter(self, handover: Any) -> None:
        self.handover = handover

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("set_")
        return lambda *_, **__: None


Made = tuple[Part, BlockParcel, nn.Parameter]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """A part, its open parcel on one of two ranks, and the first of its two parameters, which is used."""
    part: Any = Part()
    used, unused = (nn.Parameter(torch.ones(2)) for _ in range(2))
    monkeypatch.setattr(block_parcel, "sent_together", lambda _: [(used, used), (unused, unused)])
    rows: Any = {id(one): SimpleNamespace(name="weight", reach=1, local=one.detach()[:1]) for one in (used, unused)}
    parcel = BlockParcel(part, rows, 2, UnreadMemory())
    parcel.became_ready = lambda: None
    parcel.open()
    return part, parcel, used


@pytest.mark.parametrize("is_sent", [False, True])
def test_gradients_that_come_in_several_parts_are_refused(made: Made, is_sent: bool) -> None:
    part, parcel, used = made
    part.handover(torch.empty(2), torch.zeros(4))
    assert not parcel.is_ready, "the part has run once more in this pass, and was not used before"
    used.sum().backward()
    part.handover(torch.empty(2), torch.zeros(4))
    if is_sent:
        parcel.take()
    with refusing(RuntimeError):
        part.handover(torch.empty(2), torch.zeros(4))
