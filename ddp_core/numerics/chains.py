"""Products of matrices with a definition: one chain of fused multiply-adds per element (rules 2).

Each element is `c = fma(a[i, k], b[k, j], c)` in the order of k and from zero. Sums of more than 1,024 terms are cut
into pieces of that length and the rest, which are added in their order. Two ways lead to these bits, and only time
decides between them: `chain_code`, which begins at once and takes batches and any layout, and for large matrices
oneDNN's product, which knows the caches. oneDNN held to AVX2 computes such chains for at least two rows and two
columns, and for at most 1,024 terms, beyond which it may begin anew.

With several threads (`several_threads`) large products are cut by rows or by batches, and each thread computes a part.
No element is cut by that, so the bits are those of one thread.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ddp_core.base.errors import UserError
from ddp_core.base.torch_internals import product_by_onednn
from ddp_core.numerics.chain_code import ARGUMENTS, LONGEST, NARROWEST, chain_code

BY_ONEDNN_FROM = 2**25
"""Multiply-adds of one product from which oneDNN is faster, if it has `NARROWEST` rows and columns."""

_ALONE_UP_TO = 2**22
"""Multiply-adds up to which other threads of Python wait: to let them run, and to wait for them, may take longer."""

_TILES = 48
"""A part's rows are a multiple of this, which fills tiles of `chain_code` and of oneDNN."""

_FLOAT = 4
_PACKED = struct.Struct(f"{len(ARGUMENTS)}q").pack


def chained(left: Tensor, right: Tensor) -> Tensor:
    """The product in chains of float32 matrices, or of batches of them, of any layout in memory: contiguous.

    `left` is [..., rows, terms] and `right` [..., terms, columns], with the same batches.
    """
    return chained_into(left.new_empty(*left.shape[:-1], right.shape[-1]), left, right)


def chained_into(product: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Like `chained`, into a tensor whose columns lie side by side, and which shares no memory with the operands."""
    *batches, rows, terms = left.shape
    columns = right.shape[-1]
    if not product.numel():
        return product
    if not terms:
        return product.zero_()
    if columns < NARROWEST:
        wider = functional.pad(right, (0, NARROWEST - columns))
        return product.copy_(chained(left, wider)[..., :columns])
    work = rows * terms * columns
    is_large = work >= BY_ONEDNN_FROM and rows >= NARROWEST and onednn_computes_chains()
    if len(batches) > 1 or (batches and is_large):
        for into, one, other in zip(product, left, right, strict=True):
            chained_into(into, one, other)
        return product
    way = _large if is_large else _small
    if _WORKERS.pool is None or work * (batches[0] if batches else 1) <= _ALONE_UP_TO:
        way(product, left, right)
    else:
        _in_parts(way, product, left, right, _WORKERS.pool)
    return product


@cache
def onednn_computes_chains() -> bool:
    """Whether torch's oneDNN is known to: that of torch 2.11 adds in another order, those of 2.13 and 2.14 do not."""
    major, minor, *_ = torch.__version__.split(".")
    return (int(major), int(minor)) >= (2, 13)


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
_Way = Callable[[Tensor, Tensor, Tensor], None]


def _in_parts(way: _Way, product: Tensor, left: Tensor, right: Tensor, pool: ThreadPoolExecutor) -> None:
    """A product by parts of its batch or, of a single one, of its rows: one part here, the others in `pool`."""
    parts: Iterable[tuple[Tensor, Tensor, Tensor]]
    if left.dim() == 3:
        parts = zip(*(each.tensor_split(_WORKERS.count) for each in (product, left, right)), strict=True)
    else:
        rows = -(-len(left) // _WORKERS.count)
        whole = max(NARROWEST, -(-rows // _TILES) * _TILES)
        starts = [start for start in range(0, len(left), whole) if len(left) - start >= NARROWEST or not start]
        ends = [*starts[1:], len(left)]
        parts = ((product[start:end], left[start:end], right) for start, end in zip(starts, ends, strict=True))
    mine, *others = [part for part in parts if part[0].numel()]
    asked = [pool.submit(_computed, way, *part) for part in others]
    way(*mine)
    for each in asked:
        each.result()


def _computed(way: _Way, product: Tensor, left: Tensor, right: Tensor) -> None:
    """In a thread of its own, where torch would take what is computed for something to be differentiated."""
    with torch.inference_mode():
        way(product, left, right)


def _small(product: Tensor, left: Tensor, right: Tensor) -> None:
    """A product, or one dimension of batches, by `chain_code`."""
    terms = left.shape[-1]
    if terms <= LONGEST:
        _by_code(product, left, right)
        return
    _by_code(product, left[..., :LONGEST], right[..., :LONGEST, :])
    piece = torch.empty_like(product, memory_format=torch.contiguous_format)
    for start in range(LONGEST, terms, LONGEST):
        end = start + LONGEST
        _by_code(piece, left[..., start:end], right[..., start:end, :])
        product += piece


def _large(product: Tensor, left: Tensor, right: Tensor) -> None:
    """One product by oneDNN."""
    product.copy_(_by_onednn(left, right))


def _by_code(product: Tensor, left: Tensor, right: Tensor) -> None:
    """A product, or one dimension of batches, of at most `LONGEST` terms and at least `NARROWEST` columns."""
    *batches, rows, terms = left.shape
    count = batches[0] if batches else 1
    columns = right.shape[-1]
    # Of a single product, whatever stands in the place of the bytes from one product to the next is not used.
    left_batches, left_rows, left_terms = left.stride() if batches else (0, *left.stride())
    right_batches, right_terms, right_columns = right.stride() if batches else (0, *right.stride())
    out_batches, out_rows, _ = product.stride() if batches else (0, *product.stride())
    code = _code()
    call = code.alone if count * rows * terms * columns <= _ALONE_UP_TO else code.beside_others
    call(
        _PACKED(
            *(left.data_ptr(), left_rows * _FLOAT, left_terms * _FLOAT, left_batches * _FLOAT),
            *(right.data_ptr(), right_terms * _FLOAT, right_columns * _FLOAT, right_batches * _FLOAT),
            *(product.data_ptr(), out_rows * _FLOAT, out_batches * _FLOAT),
            *(rows, terms, columns, count),
        )
    )


def _by_onednn(left: Tensor, right: Tensor) -> Tensor:
    """One product; operands are copied where oneDNN would take its reference code, which computes no chain."""
    product = _piece(left[:, :LONGEST], right[:LONGEST])
    for start in range(LONGEST, left.shape[1], LONGEST):
        product += _piece(left[:, start : start + LONGEST], right[start : start + LONGEST])
    return product


def _piece(left: Tensor, right: Tensor) -> Tensor:
    weight = right.T
    if not (right.is_contiguous() or weight.is_contiguous()):
        weight = weight.contiguous()
    return product_by_onednn(left.contiguous(), weight)


class _Code(NamedTuple):
    """`chain_code` as functions of its packed arguments."""

    alone: Callable[[bytes], None]
    beside_others: Callable[[bytes], None]
    """The same, and other threads of Python run meanwhile."""
    memory: mmap.mmap
    """Where the code lies; it must not be freed."""


@cache
def _code() -> _Code:
    """Raises UserError where the system lets no process write code that it then runs."""
    code = chain_code()
    memory = mmap.mmap(-1, len(code), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(code)
    place = np.frombuffer(memory, np.uint8).ctypes.data
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(place), len(code), mmap.PROT_READ | mmap.PROT_EXEC):
        raise UserError(
            "portable numerics: this system lets no process write code and run it (SELinux's execmem, for example), "
            "which products of matrices need; use --numerics native"
        )
    kinds = ctypes.PYFUNCTYPE(None, ctypes.c_char_p), ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    alone, beside_others = (kind(place) for kind in kinds)
    return _Code(alone, beside_others, memory)
