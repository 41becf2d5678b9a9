"""The norm of a gradient: right, and with the same bits whatever the sequence in memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ddp_core.reduction import clip_gradients_, gradient_norm
from ddp_core.reduction import norm as norm_module
from ddp_core.reduction.norm import BLOCK
from tests.core.sharding.test_shards import parameters


def with_gradients(scale: float = 1.0) -> list[nn.Parameter]:
    found = parameters()
    generator = torch.Generator().manual_seed(1)
    for parameter in found:
        values = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = torch.empty_like(parameter).copy_(values * scale)
    found[2].grad = None
    return found


def test_the_norm_is_that_of_torch_and_of_any_sequence_in_memory() -> None:
    trained = with_gradients()
    norm = gradient_norm(trained)
    expected = torch.nn.utils.get_total_norm([each.grad.double() for each in trained if each.grad is not None])
    assert norm.dtype == torch.float64
    assert torch.allclose(norm, expected, rtol=1e-12)
    for parameter in trained:
        if parameter.dim() == 4 and parameter.grad is not None:
            assert not parameter.is_contiguous()
            parameter.grad = parameter.grad.contiguous()
    assert torch.equal(gradient_norm(trained), norm)


@pytest.mark.parametrize("at_once", [1, 2, 2**14])
def test_how_many_blocks_are_added_at_once_changes_no_bit(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = with_gradients()
    expected = gradient_norm(trained)
    monkeypatch.setattr(norm_module, "_ON_CPU", at_once)
    assert torch.equal(gradient_norm(trained), expected)
    for blocks in range(6):
        one = nn.Parameter(torch.ones(max(0, blocks * BLOCK - 5)))
        one.grad = torch.ones_like(one)
        assert gradient_norm([one]).item() == math.sqrt(one.numel())


def test_squares_of_large_numbers_do_not_overflow_and_nan_is_seen() -> None:
    trained = with_gradients(scale=1e30)
    assert gradient_norm(trained).isfinite()
    trained[0].grad[1] = torch.nan
    assert gradient_norm(trained).isnan()


@pytest.mark.parametrize(("max_norm", "scale"), [(0.5, 1.0), (1e9, 1.0), (1e-7, 1e-8)])
def test_clipping_is_that_of_torch(max_norm: float, scale: float) -> None:
    ours, theirs = with_gradients(scale), with_gradients(scale)
    clip_gradients_(ours, gradient_norm(ours), max_norm)
    torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.grad is None) == (other.grad is None)
        # torch computes the norm in float32.
        assert one.grad is None or torch.allclose(one.grad, other.grad, rtol=1e-4, atol=0)
