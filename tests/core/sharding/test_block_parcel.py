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


def test_a_missing_gradient_is_the_zero_that_adds_nothing(made: Made) -> None:
    part, parcel, used = made
    used.sum().backward()
    # Two ranks have a row of either; fully_shard writes +0.0 for the gradient that is missing.
    part.handover(torch.empty(2), torch.tensor([0.0, 0.0, 0.0, 0.0]))
    assert parcel.is_ready
    flat, present = parcel.take()
    assert flat is not None
    assert flat.tolist() == [0.0] * 4
    assert torch.copysign(torch.ones(4), flat).tolist() == [1.0, -1.0, 1.0, -1.0]
    assert present == [True, False]


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


def test_no_gradient_at_all_is_zeros_that_add_nothing(made: Made) -> None:
    _, parcel, _ = made
    taken, present = parcel.take()
    assert present == [False, False]
    flat = parcel.flattened(taken)
    assert torch.copysign(torch.ones(()), flat).tolist() == [-1.0] * 4
    assert flat.tolist() == [0.0] * 4
    assert parcel.like.shape == (0,)


def test_memory_that_nobody_reads_is_one_for_all() -> None:
    unread, cpu = UnreadMemory(), torch.device("cpu")
    many = unread.of(6, torch.float64, cpu)
    assert (many.shape, many.dtype) == ((6,), torch.float64)
    few = [unread.of(3, torch.float64, cpu), unread.of(6, torch.float64, cpu)]
    assert [(each.numel(), each.data_ptr()) for each in few] == [(3, many.data_ptr()), (6, many.data_ptr())]
    other = unread.of(3, torch.float32, cpu)
    assert (other.shape, other.dtype) == ((3,), torch.float32)
    assert unread.of(9, torch.float32, cpu).shape == (9,)


def test_what_torch_would_write_sums_to_is_memory_that_nobody_reads(made: Made) -> None:
    part, _, _ = made
    of = {"dtype": torch.float64, "device": torch.device("cpu")}
    sums, more, whole, another = (part.handover.allocate(size, **of) for size in ((2,), (2,), (4,), (4,)))
    assert [each.dtype for each in (sums, whole)] == [torch.float64] * 2
    assert sums.data_ptr() == more.data_ptr()
    assert len({sums.data_ptr(), whole.data_ptr(), another.data_ptr()}) == 3
