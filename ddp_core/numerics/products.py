"""Products of matrices with a definition: one chain of fused multiply-adds per element, from oneDNN (rules 2).

oneDNN held to AVX2 computes each element of a product as `c = fma(a[i, k], b[k, j], c)`, in the order of k and from
zero, however it cuts its work: for at least two rows and two columns, and for at most 1,024 numbers in a row, beyond
which it may begin anew. So longer rows are cut here, and the pieces added in their order. MKL's way, which the limits
allow, does without fused multiply-adds and takes more than twice as long, but begins faster: small products stay there.

Which way a product goes depends on its shape and dtype alone. Its layout in memory must not matter, so operands are
copied where oneDNN would take its reference code, which adds in another order and is a thousand times slower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ddp_core.base.torch_internals import product_by_onednn

CHAINED_FROM = 2**20
"""Multiply-adds from which a product is computed in chains: below, beginning takes longer than is won."""

NARROWEST = 8
"""Rows and columns from which a product is computed in chains: narrower ones are slow so, and one alone is no chain."""

LONGEST_CHAIN = 1024
"""Terms of a chain; longer sums are cut into pieces of this length and the rest."""

_OURS = (torch.float32, torch.float16, torch.bfloat16)
"""The short ones are raised to float32, in which the whole operation is computed, and rounded once at the end."""

Kernel = Callable[..., Any]


def is_chained(rows: int, terms: int, columns: int) -> bool:
    """Whether a product of [rows, terms] and [terms, columns], of a dtype that is ours, is computed in chains."""
    return min(rows, columns) >= NARROWEST and rows * terms * columns >= CHAINED_FROM


def chained(left: Tensor, right: Tensor) -> Tensor:
    """The product of two float32 matrices in chains, of any layout in memory: float32 [rows, columns], contiguous."""
    product = _piece(left[:, :LONGEST_CHAIN], right[:LONGEST_CHAIN])
    for start in range(LONGEST_CHAIN, left.shape[1], LONGEST_CHAIN):
        product += _piece(left[:, start : start + LONGEST_CHAIN], right[start : start + LONGEST_CHAIN])
    return product


def _piece(left: Tensor, right: Tensor) -> Tensor:
    weight = right.T
    if not (right.is_contiguous() or weight.is_contiguous()):
        weight = weight.contiguous()
    return product_by_onednn(left.contiguous(), weight)


def _product(usual: Kernel, keys: Any, left: Tensor, right: Tensor) -> Any:
    """The product of two matrices, or of two batches of them: `mm` and `bmm`.

    `usual` is torch's own kernel, here and in the kernels below. Where the operands do not fit, it says why.
    """
    if not _fit(left, right):
        return usual(keys, left, right)
    kind, left, right = left.dtype, left.float(), right.float()
    return (_in_chains(left, right) if _are_chained(left, right) else usual(keys, left, right)).to(kind)


def _product_into(usual: Kernel, keys: Any, left: Tensor, right: Tensor, *, out: Tensor) -> Any:
    if not _fit(left, right) or out.dtype != left.dtype:
        return usual(keys, left, right, out=out)
    left, right = left.float(), right.float()
    if _are_chained(left, right):
        return _written(out, _in_chains(left, right))
    return _written(out, usual(keys, left, right, out=_in_float32(out)))


def _sum(usual: Kernel, keys: Any, added: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """`beta * added + alpha * (left @ right)`: `addmm` and `baddbmm`."""
    if not _fit(left, right) or added.dtype != left.dtype:
        return usual(keys, added, left, right, beta=beta, alpha=alpha)
    kind, added, left, right = left.dtype, added.float(), left.float(), right.float()
    if _are_chained(left, right):
        return _added_last(added, left, right, beta, alpha).to(kind)
    return usual(keys, added, left, right, beta=beta, alpha=alpha).to(kind)


def _sum_in_place(
    usual: Kernel, keys: Any, added: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    if not _fit(left, right) or added.dtype != left.dtype:
        return usual(keys, added, left, right, beta=beta, alpha=alpha)
    left, right, total = left.float(), right.float(), added.float()
    if _are_chained(left, right):
        return added.copy_(_added_last(total, left, right, beta, alpha))
    return _written(added, usual(keys, total, left, right, beta=beta, alpha=alpha))


def _sum_into(
    usual: Kernel, keys: Any, added: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor
) -> Any:
    if not _fit(left, right) or not added.dtype == left.dtype == out.dtype:
        return usual(keys, added, left, right, beta=beta, alpha=alpha, out=out)
    added, left, right = added.float(), left.float(), right.float()
    if _are_chained(left, right):
        return _written(out, _added_last(added, left, right, beta, alpha))
    return _written(out, usual(keys, added, left, right, beta=beta, alpha=alpha, out=_in_float32(out)))


def _fit(left: Tensor, right: Tensor) -> bool:
    """Whether these are two matrices, or two batches of them, that can be multiplied and whose dtype is ours."""
    if left.dtype not in _OURS or right.dtype != left.dtype or not left.dim() == right.dim() in (2, 3):
        return False
    return left.shape[-1] == right.shape[-2] and left.shape[:-2] == right.shape[:-2]


def _are_chained(left: Tensor, right: Tensor) -> bool:
    return is_chained(left.shape[-2], left.shape[-1], right.shape[-1])


def _in_chains(left: Tensor, right: Tensor) -> Tensor:
    if left.dim() == 2:
        return chained(left, right)
    return torch.stack([chained(each, other) for each, other in zip(left, right, strict=True)])


def _added_last(added: Tensor, left: Tensor, right: Tensor, beta: Any, alpha: Any) -> Tensor:
    """The product, times alpha, plus beta times `added`: each rounded to float32."""
    total = _in_chains(left, right)
    if alpha != 1:
        total *= alpha
    if beta != 0:
        total += added if beta == 1 else added * beta
    return total


def _in_float32(out: Tensor) -> Tensor:
    return out if out.dtype == torch.float32 else out.new_empty(0, dtype=torch.float32)


def _written(out: Tensor, result: Tensor) -> Tensor:
    if result is out:
        return out
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


PRODUCTS: Mapping[str, Kernel] = {
    "aten::mm": _product,
    "aten::mm.out": _product_into,
    "aten::bmm": _product,
    "aten::bmm.out": _product_into,
    "aten::addmm": _sum,
    "aten::addmm_": _sum_in_place,
    "aten::addmm.out": _sum_into,
    "aten::baddbmm": _sum,
    "aten::baddbmm_": _sum_in_place,
    "aten::baddbmm.out": _sum_into,
}
"""By the dispatcher's name of an operation, what replaces torch's kernel under version 2 of the rules."""
