"""What a portable product is by definition: chains of fused multiply-adds, in numpy and without torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_LONGEST_CHAIN = 1024


def fused(a: Any, b: Any, c: Any) -> Array:
    """a * b + c in float32, rounded once, as a fused multiply-add rounds it.

    In float64 the product is exact and the sum is not. So the sum is rounded to odd: where it was not exact, to the
    neighbour whose last bit is 1. Rounding that to float32 gives what rounding the exact sum gives (S. Boldo,
    G. Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    """
    product = np.multiply(a, b, dtype=np.float64)
    addend = np.asarray(c, np.float64)
    total = np.asarray(product + addend)
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    is_cut = (lost != 0) & np.isfinite(lost) & (bits % 2 == 0)
    outwards = np.where((lost > 0) == (total > 0), 1, -1)
    return np.asarray((bits + is_cut * outwards).view(np.float64).astype(np.float32))


def product_in_chains(left: Array, right: Array) -> Array:
    """A product of float32 matrices, or of batches of them: per element one chain in the order of k.

    A chain is of fused multiply-adds, and has at most 1,024 terms; longer sums are cut there, and the pieces added in
    their order.
    """
    pieces = []
    for start in range(0, left.shape[-1], _LONGEST_CHAIN):
        chain = np.zeros((*left.shape[:-1], right.shape[-1]), np.float32)
        for k in range(start, min(start + _LONGEST_CHAIN, left.shape[-1])):
            chain = fused(left[..., k, None], right[..., k, None, :], chain)
        pieces.append(chain)
    return np.asarray(sum(pieces[1:], pieces[0]))
