"""Inputs of the probe's operations as tensors, and what gives their results and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_lab.probe.definition import inputs as exact

Operation = Callable[[], Any]
"""Computes something at fixed inputs; returns a tensor, an array, a number, or a list, tuple or dict of them."""

Operations = Mapping[str, Operation]


def numbers(*shape: int, key: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers in [-scale, scale), of 24 bits each; with a power of two as `scale` they are exact in float32."""
    return torch.from_numpy(exact.numbers(*shape, key=key, scale=scale, dtype=np.float64)).to(dtype)


def positive(*shape: int, key: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers in (0, scale], of 24 bits each."""
    return torch.from_numpy(exact.positive(*shape, key=key, scale=scale, dtype=np.float64)).to(dtype)


def integers(*shape: int, below: int, key: int = 0) -> Tensor:
    """Integers in [0, below): int64."""
    return torch.from_numpy(exact.integers(*shape, below=below, key=key))


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The result of a function of floating-point tensors, and the gradients of the inputs for a fixed one of it."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    result = function(*leaves)
    gradients = torch.autograd.grad(result, leaves, numbers(*result.shape, key=99, dtype=result.dtype))
    return [result.detach(), *gradients]


def of_module(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """The result of a module whose weights are set to fixed numbers, its buffers, and all gradients."""
    parameters = list(module.parameters())
    with torch.no_grad():
        for key, parameter in enumerate(parameters):
            parameter.copy_(numbers(*parameter.shape, key=50 + key, scale=0.25))
    leaves = [each.detach().clone().requires_grad_(each.is_floating_point()) for each in inputs]
    result = module(*leaves)
    result = result[0] if isinstance(result, tuple) else result
    wanted = [*parameters, *(leaf for leaf in leaves if leaf.requires_grad)]
    gradients = torch.autograd.grad(result, wanted, numbers(*result.shape, key=99, dtype=result.dtype))
    return [result.detach(), *gradients, *(buffer.clone() for buffer in module.buffers())]
