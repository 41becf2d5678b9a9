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
    """`beta * added + alpha * (left @ right)`, each rounded to float32: `addmm` and `baddbmm`."""
    if beta == 1 and alpha == 1:
        product = at_once(dimensions, left, right, added)
        if product is not None:
            return product
    if not _can_add(dimensions, added, left, right):
        return usual(keys, added, left, right, beta=beta, alpha=alpha)
    total = chained(left.float(), right.float())
    if alpha != 1:
        total *= alpha
    if beta != 0:
        total += added.float() if beta == 1 else added.float() * beta
    return total.to(left.dtype)


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


def _nothing(*_: Any, **__: Any) -> None:
    """In the place of torch's own kernel, tells `in_place` and `into` that the operands are not ours."""


def in_place(kernel: Kernel) -> Kernel:
    """The form of a kernel that writes its result over the first operand."""

    def computed(usual: Kernel, keys: Any, target: Tensor, *others: Any, **named: Any) -> Any:
        result = kernel(_nothing, keys, target, *others, **named)
        if result is None or (result.shape, result.dtype) != (target.shape, target.dtype):
            return usual(keys, target, *others, **named)
        return target.copy_(result)

    return computed


def into(kernel: Kernel, casts: bool = False) -> Kernel:
    """The form of a kernel that writes its result into `out`, resized where it has another shape.

    `casts`: whether torch lets `out` have another dtype that can hold the result.
    """

    def computed(usual: Kernel, keys: Any, *operands: Any, out: Tensor, **named: Any) -> Any:
        result = kernel(_nothing, keys, *operands, **named)
        # Where `out` cannot hold the result, torch's own kernel says why.
        if result is None or not (torch.can_cast(result.dtype, out.dtype) if casts else result.dtype == out.dtype):
            return usual(keys, *operands, out=out, **named)
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return computed


def _all_forms(dimensions: int, product: str, added: str) -> dict[str, Kernel]:
    multiplies, adds = partial(_product, dimensions), partial(_sum, dimensions)
    return {
        f"aten::{product}": multiplies,
        f"aten::{product}.out": into(multiplies),
        f"aten::{added}": adds,
        f"aten::{added}_": in_place(adds),
        f"aten::{added}.out": into(adds),
    }


PRODUCTS: Mapping[str, Kernel] = {**_all_forms(2, "mm", "addmm"), **_all_forms(3, "bmm", "baddbmm")}
"""By the dispatcher's name of an operation, what replaces torch's kernel."""
