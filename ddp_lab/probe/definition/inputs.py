"""Inputs of the probe's operations: numbers made from integers alone, so that they have the same bits everywhere."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ddp_core.base.seeds import finalise

Array = NDArray[Any]


def words(count: int, key: int = 0) -> NDArray[np.uint64]:
    """Pseudo-random numbers of 64 bits: uint64 [count]."""
    return finalise(np.arange(1, count + 1, dtype=np.uint64) + np.uint64(key << 32))


def numbers(*shape: int, key: int = 0, scale: float = 1.0, dtype: DTypeLike = np.float32) -> Array:
    """Numbers in [-scale, scale), of 24 bits each; with a power of two as `scale` they are exact in float32."""
    whole = (words(prod(shape), key) >> np.uint64(40)).astype(np.float64)
    return ((whole * 2.0**-23 - 1) * scale).reshape(shape).astype(dtype)


def positive(*shape: int, key: int = 0, scale: float = 1.0, dtype: DTypeLike = np.float32) -> Array:
    """Numbers in (0, scale], of 24 bits each."""
    whole = (words(prod(shape), key) >> np.uint64(40)).astype(np.float64)
    return ((whole + 1) * 2.0**-24 * scale).reshape(shape).astype(dtype)


def integers(*shape: int, below: int, key: int = 0) -> NDArray[np.int64]:
    """Integers in [0, below)."""
    return (words(prod(shape), key) % np.uint64(below)).astype(np.int64).reshape(shape)
