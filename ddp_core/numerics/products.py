"""Products of matrices that replace torch's: chains, whatever their shape or layout.

What is added to a product comes last, so that it does not matter how a library begins its sums. float16 and bfloat16
are raised to float32, in which the whole operation is computed, and rounded once at the end. Other dtypes, float64
among them, stay torch's own: MKL's under the limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddp_core.numerics.chains import at_once, chained

OURS = (torch.float32, torch.float16, torch.bfloat16)

Kernel = Callable[..., Any]
"""What the dispatcher calls: with the dispatch keys first, which torch's own kernel must be given, too."""


def _product(dimensions: int, usual: Kernel, keys: Any, left: Tensor, right: Tensor) -> Any:
    """The product of two matrices, or of two batches of them: `mm` and `bmm`.

    `dimensions` is 2 or 3, and `usual` torch's own kernel, here and in the kernels below. Where the operands do not
    fit, that kernel says why.
    """
    product = at_once(dimensions, left, right)
    if product is not None:
        return product
    if not _fit(dimensions, left, right):
        return usual(keys, left, right)
    return chained(left, right) if left.dtype == torch.float32 else chained(left.float(), right.float()).to(left.dtype)


def _product_into(dimensions: int, usual: Kernel, keys: Any, left: Tensor, right: Tensor, *, out: Tensor) -> Any:
    if not _fit(dimensions, left, right) or out.dtype != left.dtype:
        return usual(keys, left, right, out=out)
    return written(out, chained(left.float(), right.float()))


def _sum(
    dimensions: int,
    usual: Kernel,
    keys: Any,
    added: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    beta: Any = 1,
    alpha: Any = 1,
) -> Any:
    """`beta * added + alpha * (left @ right)`: `addmm` and `baddbmm`."""
    if beta == 1 and alpha == 1:
        product = at_once(dimensions, left, right, added)
        if product is not None:
            return product
    if not _can_add(dimensions, added, left, right):
        return usual(keys, added, left, right, beta=beta, alpha=alpha)
    return _added_last(added.float(), left.float(), right.float(), beta, alpha).to(left.dtype)


def _sum_in_place(
    dimensions: int,
    usual: Kernel,
    keys: Any,
    added: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    beta: Any = 1,
    alpha: Any = 1,
) -> Any:
    if not _can_add(dimensions, added, left, right) or added.shape != (*left.shape[:-1], right.shape[-1]):
        return usual(keys, added, left, right, beta=beta, alpha=alpha)
    return added.copy_(_added_last(added.float(), left.float(), right.float(), beta, alpha))


def _sum_into(
    dimensions: int,
    usual: Kernel,
    keys: Any,
    added: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    out: Tensor,
) -> Any:
    if not _can_add(dimensions, added, left, right) or out.dtype != left.dtype:
        return usual(keys, added, left, right, beta=beta, alpha=alpha, out=out)
    return written(out, _added_last(added.float(), left.float(), right.float(), beta, alpha))


def _fit(dimensions: int, left: Tensor, right: Tensor) -> bool:
    """Whether these are two matrices, or two batches of them, that can be multiplied and whose dtype is ours."""
    if left.dtype not in OURS or right.dtype != left.dtype or not left.dim() == right.dim() == dimensions:
        return False
    return left.shape[-1] == right.shape[-2] and left.shape[:-2] == right.shape[:-2]


def _can_add(dimensions: int, added: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether these can be multiplied, and `added` has the product's shape or can be repeated to have it."""
    if not _fit(dimensions, left, right) or added.dtype != left.dtype or added.dim() > left.dim():
        return False
    shape = (*left.shape[:-1], right.shape[-1])[left.dim() - added.dim() :]
    return all(ours in (1, theirs) for ours, theirs in zip(added.shape, shape, strict=True))


def _added_last(added: Tensor, left: Tensor, right: Tensor, beta: Any, alpha: Any) -> Tensor:
    """The product, times alpha, plus beta times `added`: each rounded to float32."""
    total = chained(left, right)
    if alpha != 1:
        total *= alpha
    if beta != 0:
        total += added if beta == 1 else added * beta
    return total


def written(out: Tensor, result: Tensor) -> Tensor:
    """`out` with the result in it, resized where it has another shape."""
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


_OF_MATRICES: Mapping[str, Kernel] = {
    "aten::mm": _product,
    "aten::mm.out": _product_into,
    "aten::addmm": _sum,
    "aten::addmm_": _sum_in_place,
    "aten::addmm.out": _sum_into,
}
_OF_BATCHES: Mapping[str, Kernel] = {
    "aten::bmm": _product,
    "aten::bmm.out": _product_into,
    "aten::baddbmm": _sum,
    "aten::baddbmm_": _sum_in_place,
    "aten::baddbmm.out": _sum_into,
}
PRODUCTS: Mapping[str, Kernel] = {
    **{name: partial(kernel, 2) for name, kernel in _OF_MATRICES.items()},
    **{name: partial(kernel, 3) for name, kernel in _OF_BATCHES.items()},
}
"""By the dispatcher's name of an operation, what replaces torch's kernel."""
