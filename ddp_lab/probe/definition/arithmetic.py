"""Fused multiply-adds, and the orders in which sums and products of matrices add."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp_lab.probe.definition.inputs import Array

_LANES = 8
"""float32 numbers in a register of AVX2; of float64 there are half as many."""

_AT_ONCE = 4
"""Registers that a sum fills side by side."""

_LEVELS = 4

LONGEST_CHAIN = 1024


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


def in_turn(terms: Array) -> Array:
    """The sum over the first axis, one after the other from zero on."""
    total = np.zeros(terms.shape[1:], terms.dtype)
    for term in terms:
        total = total + term
    return np.asarray(total)


def cascaded(terms: Array) -> Array:
    """The sum over the first axis by four levels of partial sums, as torch.sum makes it of each column.

    Each sum takes 16 terms (or more, of very many) and is then added to the one above it, which takes 16 of them.
    """
    exponent = max(4, (len(terms) - 1).bit_length() // _LEVELS)
    step = 2**exponent
    sums = [np.zeros(terms.shape[1:], terms.dtype) for _ in range(_LEVELS)]
    whole = len(terms) // step * step
    for done in range(step, whole + 1, step):
        sums[0] = in_turn(terms[done - step : done])
        for level in range(1, _LEVELS):
            sums[level] = sums[level] + sums[level - 1]
            sums[level - 1] = np.zeros(terms.shape[1:], terms.dtype)
            if done >> level * exponent & step - 1:
                break
    for term in terms[whole:]:
        sums[0] = sums[0] + term
    return np.asarray(sums[0] + sums[1] + sums[2] + sums[3])


def interleaved(terms: Array) -> Array:
    """The sum over the first axis by four sums of every fourth term, which are added up at the end."""
    whole = len(terms) // _AT_ONCE * _AT_ONCE
    first, *others = cascaded(terms[:whole].reshape(whole // _AT_ONCE, _AT_ONCE, *terms.shape[1:]))
    for part in (*terms[whole:], *others):
        first = first + part
    return np.asarray(first)


def sum_of_rows(x: Array) -> Array:
    """torch.sum over the last axis: a sum per lane of a register; then the numbers that fill none, and the lanes."""
    lanes = _LANES * 4 // x.itemsize
    whole = x.shape[-1] // lanes * lanes
    registers = np.moveaxis(x[..., :whole].reshape(*x.shape[:-1], -1, lanes), -2, 0)
    by_lane = np.moveaxis(interleaved(registers), -1, 0)
    return in_turn(np.concatenate([np.moveaxis(x[..., whole:], -1, 0), by_lane]))


def sum_of_columns(x: Array) -> Array:
    """torch.sum over the first of two axes: 32 columns at a time are cascaded, the rest is interleaved."""
    whole = x.shape[1] // (_LANES * _AT_ONCE) * (_LANES * _AT_ONCE)
    return np.concatenate([cascaded(x[:, :whole]), interleaved(x[:, whole:])])


def reduced(first: Array, *others: Array) -> Array:
    """The sum over the last axis of `first` times all `others`, in the order in which torch's norms and softmax add.

    Eight numbers at a time are added to the same eight sums, the lanes of one register of the CPU. Products are rounded
    before that; of the numbers at the end that are fewer than eight, the last product is a fused multiply-add. At last
    the lanes are added in pairs: four apart, two apart, one apart.
    """
    factors = [np.broadcast_to(each, first.shape) for each in others]
    whole = first.shape[-1] // _LANES * _LANES
    product = first
    for factor in factors:
        before, product = product, product * factor
    lanes = product[..., :_LANES]
    for start in range(_LANES, whole, _LANES):
        lanes = lanes + product[..., start : start + _LANES]
    rest = first.shape[-1] - whole
    if rest:
        fitting = lanes[..., :rest]
        if factors:
            fitting = fused(before[..., whole:], factors[-1][..., whole:], fitting)
        else:
            fitting = fitting + first[..., whole:]
        lanes = np.concatenate([fitting, lanes[..., rest:]], -1)
    for apart in (4, 2, 1):
        lanes = lanes[..., :apart] + lanes[..., apart : 2 * apart]
    return np.asarray(lanes[..., 0])


def product_in_chains(left: Array, right: Array) -> Array:
    """A product of float32 matrices, or of batches of them: per element one chain in the order of k.

    A chain is of fused multiply-adds, and has at most 1,024 terms; longer sums are cut there, and the pieces added in
    their order.
    """
    pieces = []
    for start in range(0, left.shape[-1], LONGEST_CHAIN):
        chain = np.zeros((*left.shape[:-1], right.shape[-1]), np.float32)
        for k in range(start, min(start + LONGEST_CHAIN, left.shape[-1])):
            chain = fused(left[..., k, None], right[..., k, None, :], chain)
        pieces.append(chain)
    return pieces[0] if len(pieces) == 1 else in_turn(np.stack(pieces))
