"""Tensors with their channels innermost: the same values, at other places in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_core.base.digests import weights_digest
from ddp_core.model.builders import laid_out, lay_out
from ddp_core.model.optimizers import fills_its_memory, same_layout

IMAGES, FILM = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5, 6)


def test_a_model_keeps_its_parameters_and_its_digest() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv3d(2, 2, 3), nn.Linear(4, 2))
    before, digest = list(model.parameters()), weights_digest(model.state_dict())
    assert lay_out(model, "channels_last") is model
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), before, strict=True))
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert not model[0].weight.is_contiguous()
    assert weights_digest(model.state_dict()) == digest


@pytest.mark.parametrize("tensor", [IMAGES, FILM])
def test_what_has_channels_is_laid_out(tensor: torch.Tensor) -> None:
    found = laid_out(tensor, "channels_last")
    assert torch.equal(found, tensor)
    assert found.stride()[1] == 1
    assert laid_out(tensor, "contiguous") is tensor
    assert laid_out(found, "channels_last") is found


def test_what_has_no_channels_stays_as_it_is() -> None:
    for tensor in (torch.ones(3), torch.ones(2, 3), torch.arange(6).reshape(1, 2, 3)):
        assert laid_out(tensor, "channels_last") is tensor


def test_strides_of_a_single_element_mean_nothing() -> None:
    filters = torch.randn(4, 1, 3, 3)
    last = filters.contiguous(memory_format=torch.channels_last)
    assert same_layout(filters, last.as_strided(filters.shape, (9, 1, 3, 1)))
    assert not same_layout(IMAGES, laid_out(IMAGES, "channels_last"))


def test_memory_may_be_filled_in_any_sequence() -> None:
    filled = [IMAGES, IMAGES.permute(2, 0, 3, 1), laid_out(FILM, "channels_last"), torch.ones(()), torch.ones(0)]
    overlapping = [torch.ones(3).expand(2, 3), torch.ones(4).as_strided((2, 2), (1, 1))]
    assert all(map(fills_its_memory, filled))
    assert not any(map(fills_its_memory, [IMAGES[:, :2], IMAGES[..., ::2], *overlapping]))
