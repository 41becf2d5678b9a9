"""Products of matrices with a definition: one chain of fused multiply-adds per element.

Each element is `c = fma(a[i, k], b[k, j], c)` in the order of k and from zero. Sums of more than 1,024 terms are cut
into pieces of that length and the rest, which are added in their order. The code of `chain_code` computes them; of
large products some rows at a time, which stay in the CPU's cache.

With several threads (`several_threads`) large products are cut by rows or by batches, and each thread computes a part.
No element is cut by that, so the bits are those of one thread.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_core.base.errors import UserError
from ddp_core.numerics.chain_code import FLOAT, LONGEST, SIZES, chain_code

_ALONE_UP_TO = 2**22
"""Multiply-adds up to which other threads of Python wait: to let them run, and to wait for them, may take longer."""

_TILES = 48
"""A part's rows are a multiple of this, which fills tiles of `chain_code`."""

_ROWS = 22 * _TILES
"""Rows of a large product that are computed at a time."""

_KIND = torch.float32
_PACKED = struct.Struct(f"{len(SIZES)}q").pack
_PLANS = 4096
"""Pairs of shapes and strides that are kept in mind."""


def chained(left: Tensor, right: Tensor) -> Tensor:
    """The product in chains of float32 matrices, or of batches of them, of any layout in memory: contiguous.

    `left` is [..., rows, terms] and `right` [..., terms, columns], with the same batches.
    """
    product = at_once(left.dim(), left, right)
    if product is None:
        product = chained_into(left.new_empty(*left.shape[:-1], right.shape[-1]), left, right)
    return product


def at_once(dimensions: int, left: Tensor, right: Tensor, added: Tensor | None = None) -> Tensor | None:
    """The product where one call of the code computes it, because it is small and has these dimensions; else None.

    `added` is a row of numbers that is added last. What there is to find out about shapes is found out once.
    """
    if left.dtype is not _KIND or right.dtype is not _KIND:
        return None
    if added is None:
        place, plan = 0, _plan(dimensions, left.shape, left.stride(), right.shape, right.stride())
    elif added.dtype is _KIND:
        place = added.data_ptr()
        plan = _plan(dimensions, left.shape, left.stride(), right.shape, right.stride(), added.shape, added.stride())
    else:
        return None
    if plan is None or plan.work > _ALONE_UP_TO:
        return None
    product = left.new_empty(plan.shape)
    _code().alone(plan.sizes, left.data_ptr(), right.data_ptr(), product.data_ptr(), place)
    return product


class _Plan(NamedTuple):
    """What one call of the code is given for operands of these shapes and strides."""

    shape: tuple[int, ...]
    sizes: bytes
    work: int
    """Multiply-adds."""


@lru_cache(_PLANS)
def _plan(
    dimensions: int,
    left: torch.Size,
    left_strides: tuple[int, ...],
    right: torch.Size,
    right_strides: tuple[int, ...],
    added: tuple[int, ...] | None = None,
    added_strides: tuple[int, ...] = (),
) -> _Plan | None:
    """None where one call does not compute it, or nothing does."""
    if not len(left) == len(right) == dimensions or left[:-2] != right[:-2] or left[-1] != right[-2]:
        return None
    shape, columns = (*left[:-1], right[-1]), right[-1]
    work = left.numel() * columns
    is_row = added is None or (tuple(added) == (columns,) and (columns == 1 or added_strides == (1,)))
    if not (2 <= dimensions <= 4 and work and left[-1] <= LONGEST and is_row):
        return None
    strides = tuple(prod(shape[place + 1 :]) for place in range(dimensions))
    return _Plan(shape, _sizes(left, columns, left_strides, right_strides, strides), work)


def _sizes(
    left: Sequence[int],
    columns: int,
    left_strides: Sequence[int],
    right_strides: Sequence[int],
    out_strides: Sequence[int],
) -> bytes:
    """`SIZES` for a product, a batch of products, or several batches."""
    groups, batches, rows, terms = (*(1, 1)[len(left) - 2 :], *left)
    left_groups, left_batches, left_rows, left_terms = _four(left_strides)
    right_groups, right_batches, right_terms, right_columns = _four(right_strides)
    out_groups, out_batches, out_rows, _ = _four(out_strides)
    strides = [
        *(left_rows, left_terms, left_batches, left_groups),
        *(right_terms, right_columns, right_batches, right_groups),
        *(out_rows, out_batches, out_groups),
    ]
    return _PACKED(*(FLOAT * each for each in strides), rows, terms, columns, batches, groups)


def _four(strides: Sequence[int]) -> tuple[int, ...]:
    return (*(0, 0)[len(strides) - 2 :], *strides)


def chained_into(product: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Like `chained`, into a tensor whose columns lie side by side, and which shares no memory with the operands."""
    *batches, rows, terms = left.shape
    columns = right.shape[-1]
    if not product.numel():
        return product
    if not terms:
        return product.zero_()
    if len(batches) > 2:
        for into, one, other in zip(product, left, right, strict=True):
            chained_into(into, one, other)
    elif _WORKERS.pool is None or prod(batches) * rows * terms * columns <= _ALONE_UP_TO:
        _whole(product, left, right)
    else:
        _in_parts(product, left, right, _WORKERS.pool)
    return product


@contextmanager
def several_threads(count: int) -> Iterator[None]:
    """While in the block, large products are computed in `count` threads, in the whole process."""
    if count == 1:
        yield
        return
    with ThreadPoolExecutor(count - 1, "product", initializer=torch.set_num_threads, initargs=(1,)) as pool:
        _WORKERS.pool, _WORKERS.count = pool, count
        try:
            yield
        finally:
            _WORKERS.pool = None


class _Workers:
    """The threads that compute parts of a product beside the one that asks for it; forked processes have none."""

    pool: ThreadPoolExecutor | None = None
    count = 1

    def __init__(self) -> None:
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self.pool = None


_WORKERS = _Workers()


def _in_parts(product: Tensor, left: Tensor, right: Tensor, pool: ThreadPoolExecutor) -> None:
    """A product by parts of its batches or, of a single one, of its rows: one part here, the others in `pool`."""
    parts: Iterable[tuple[Tensor, Tensor, Tensor]]
    while left.dim() > 2 and len(left) == 1:
        product, left, right = product[0], left[0], right[0]
    if left.dim() > 2:
        parts = zip(*(each.tensor_split(_WORKERS.count) for each in (product, left, right)), strict=True)
    else:
        rows = -(-len(left) // _WORKERS.count)
        parts = _by_rows(product, left, right, -(-rows // _TILES) * _TILES)
    mine, *others = [part for part in parts if part[0].numel()]
    # In a thread of its own, torch would take what is computed for something to be differentiated.
    asked = [pool.submit(torch.inference_mode()(_whole), *part) for part in others]
    _whole(*mine)
    for each in asked:
        each.result()


def _by_rows(product: Tensor, left: Tensor, right: Tensor, rows: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """A single product, so many rows of it at a time."""
    for start in range(0, len(left), rows):
        yield product[start : start + rows], left[start : start + rows], right


def _whole(product: Tensor, left: Tensor, right: Tensor) -> None:
    """A product, or one or two dimensions of batches."""
    terms = left.shape[-1]
    if terms <= LONGEST:
        _piece(product, left, right)
        return
    _piece(product, left[..., :LONGEST], right[..., :LONGEST, :])
    piece = torch.empty_like(product, memory_format=torch.contiguous_format)
    for start in range(LONGEST, terms, LONGEST):
        end = start + LONGEST
        _piece(piece, left[..., start:end], right[..., start:end, :])
        product += piece


def _piece(product: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute a product of at most `LONGEST` terms."""
    if left.dim() > 2 or left.numel() * right.shape[-1] <= _ALONE_UP_TO:
        _by_code(product, left, right)
        return
    if left.stride(-1) != 1:
        left = left.contiguous()  # takes less time than to read again and again what lies far apart
    for part in _by_rows(product, left, right, _ROWS):
        _by_code(*part)


def _by_code(product: Tensor, left: Tensor, right: Tensor) -> None:
    """A product, or one or two dimensions of batches, of at most `LONGEST` terms."""
    sizes = _sizes(left.shape, right.shape[-1], left.stride(), right.stride(), product.stride())
    code = _code()
    call = code.alone if left.numel() * right.shape[-1] <= _ALONE_UP_TO else code.beside_others
    call(sizes, left.data_ptr(), right.data_ptr(), product.data_ptr(), 0)


class _Code(NamedTuple):
    """`chain_code` as functions of sizes, the places of left, right and result, and that of what is added."""

    alone: Callable[[bytes, int, int, int, int], None]
    beside_others: Callable[[bytes, int, int, int, int], None]
    """The same, and other threads of Python run meanwhile."""


_MAPPED: list[mmap.mmap] = []
"""Where the code lies. Of threads that ask for it first at the same time, each maps its own: none may ever be freed."""


@cache
def _code() -> _Code:
    """Raises UserError where the system lets no process write code that it then runs."""
    code = chain_code()
    memory = mmap.mmap(-1, len(code), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(code)
    _MAPPED.append(memory)
    place = np.frombuffer(memory, np.uint8).ctypes.data
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(place), len(code), mmap.PROT_READ | mmap.PROT_EXEC):
        raise UserError(
            "portable numerics: this system lets no process write code and run it (SELinux's execmem, for example), "
            "which products of matrices need; use --numerics native"
        )
    words = (ctypes.c_char_p, *[ctypes.c_void_p] * 4)
    alone, beside_others = (kind(None, *words)(place) for kind in (ctypes.PYFUNCTYPE, ctypes.CFUNCTYPE))
    return _Code(alone, beside_others)
