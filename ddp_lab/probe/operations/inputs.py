"""Inputs of the probe's operations, made from integers alone, and what gives their results and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ddp_core.base.seeds import finalise

Operation = Callable[[], Any]
"""Computes something at fixed inputs; returns a tensor, an array, a number, or a list, tuple or dict of them."""

Operations = dict[str, Operation]


def words(count: int, key: int = 0) -> NDArray[np.uint64]:
    """Pseudo-random numbers of 64 bits: uint64 [count]."""
    return finalise(np.arange(1, count + 1, dtype=np.uint64) + np.uint64(key << 32))


def numbers(*shape: int, key: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers in [-scale, scale), of 24 bits each; with a power of two as `scale` they are exact in float32."""
    return ((_whole(shape, key) * 2.0**-23 - 1) * scale).to(dtype)


def positive(*shape: int, key: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers in (0, scale], of 24 bits each."""
    return ((_whole(shape, key) + 1) * 2.0**-24 * scale).to(dtype)


def integers(*shape: int, below: int, key: int = 0) -> Tensor:
    """Integers in [0, below): int64."""
    return torch.from_numpy((words(prod(shape), key) % np.uint64(below)).astype(np.int64).reshape(shape))


def _whole(shape: tuple[int, ...], key: int) -> Tensor:
    """Whole numbers below 2^24, as float64."""
    return torch.from_numpy((words(prod(shape), key) >> np.uint64(40)).astype(np.float64).reshape(shape))


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The result of a function of floating-point tensors, and the gradients of the inputs for a fixed one of it."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    result = function(*leaves)
    gradients = torch.autograd.grad(result, leaves, numbers(*result.shape, key=99, dtype=result.dtype))
    return [result.detach(), *gradients]


def of_module(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """The result of a copy of a module whose weights are set to fixed numbers, its buffers, and all gradients."""
    module = copy.deepcopy(module)
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


def backward(entries: Mapping[str, tuple[Any, ...]]) -> Operations:
    """By name: of a function, or a module, and its inputs, the result and the gradients."""
    return {
        f"{name}, backward": partial(of_module if isinstance(what, nn.Module) else with_gradients, what, *inputs)
        for name, (what, *inputs) in entries.items()
    }


def seeded(function: Callable[[], Any]) -> Any:
    """What a function draws from torch's generator with a fixed seed."""
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        return function()
