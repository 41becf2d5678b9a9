"""Kernels in the place of those of torch's CPU kernels that unlike CPUs compute differently in spite of the limits.

torch takes square roots from MKL, whose result is not the nearest number: it is off by the last bit for one float32
number in five, on each CPU for others. IEEE 754 asks for the nearest number, and the CPU's own instruction, which numpy
uses, gives it. The replacement is made in torch's dispatcher, so that models, optimizers, backward passes and torch's
own compositions all get it. float16 and bfloat16 need none: torch computes their roots as float32 and rounds, which
gives the nearest number for so few bits. Complex roots are left as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.library import Library, get_kernel

from ddp_core.base.errors import UserError
from ddp_core.numerics.limits import limits_hold, limits_missed
from ddp_core.numerics.refusals import REFUSED, refuse

_OURS = (torch.float32, torch.float64)

Replaced = Callable[..., Any]
"""What the dispatcher calls: with the keys of its tensors first, which torch's own kernel must be given."""


@contextmanager
def portable_kernels() -> Iterator[None]:
    """While in the block, torch computes with the portable kernels and one thread, in the whole process.

    Raises UserError where torch was loaded without the limits. An operation that cannot be had raises UserError when it
    is called.
    """
    if not limits_hold():
        raise UserError(limits_missed())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # The kernels are gone with the library.
    library = Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            # torch warns that kernels are replaced, which is meant.
            warnings.simplefilter("ignore")
            for name, make in _REPLACEMENTS.items():
                library.impl(name, make(get_kernel(f"aten::{name}", "CPU").call_boxed), "CPU", with_keyset=True)
            for name in REFUSED:
                library.impl(name, refuse(name), "CPU")
        yield
    finally:
        del library
        torch.set_num_threads(threads)


def exact_root(numbers: Tensor) -> Tensor:
    """The square root of float32, float64 or whole numbers, rounded to the nearest.

    Like torch's own, it has the shape and strides of `numbers`, and torch's default dtype for whole numbers.
    """
    if not numbers.is_floating_point():
        numbers = numbers.to(torch.get_default_dtype())
    roots = torch.empty_like(numbers)
    # A negative number has no root: NaN, without a warning, as from torch.
    with np.errstate(invalid="ignore"):
        np.sqrt(numbers.detach().numpy(), out=roots.numpy())
    return roots


def _root(usual: Replaced) -> Replaced:
    def sqrt(keys: Any, numbers: Tensor) -> Tensor:
        return exact_root(numbers) if _is_ours(numbers) else usual(keys, numbers)

    return sqrt


def _root_in_place(usual: Replaced) -> Replaced:
    def sqrt_(keys: Any, numbers: Tensor) -> Tensor:
        return numbers.copy_(exact_root(numbers)) if numbers.dtype in _OURS else usual(keys, numbers)

    return sqrt_


def _root_into(usual: Replaced) -> Replaced:
    def sqrt_out(keys: Any, numbers: Tensor, *, out: Tensor) -> Tensor:
        return _put(exact_root(numbers), out) if _fits(numbers, out) else usual(keys, numbers, out=out)

    return sqrt_out


def _power(usual: Replaced) -> Replaced:
    def pow_(keys: Any, numbers: Tensor, exponent: Any) -> Tensor:
        is_root = _is_half(exponent) and _is_ours(numbers)
        return exact_root(numbers) if is_root else usual(keys, numbers, exponent)

    return pow_


def _power_in_place(usual: Replaced) -> Replaced:
    def pow_(keys: Any, numbers: Tensor, exponent: Any) -> Tensor:
        is_root = _is_half(exponent) and numbers.dtype in _OURS
        return numbers.copy_(exact_root(numbers)) if is_root else usual(keys, numbers, exponent)

    return pow_


def _power_into(usual: Replaced) -> Replaced:
    def pow_out(keys: Any, numbers: Tensor, exponent: Any, *, out: Tensor) -> Tensor:
        is_root = _is_half(exponent) and _fits(numbers, out)
        return _put(exact_root(numbers), out) if is_root else usual(keys, numbers, exponent, out=out)

    return pow_out


def _is_ours(numbers: Tensor) -> bool:
    """Whether torch's root of these would be MKL's."""
    kind = numbers.dtype
    is_whole = not (kind.is_floating_point or kind.is_complex)
    return (torch.get_default_dtype() if is_whole else kind) in _OURS


def _fits(numbers: Tensor, out: Tensor) -> bool:
    """Whether the root can be put into `out`; torch's own kernel says why not."""
    kind = numbers.dtype if numbers.is_floating_point() else torch.get_default_dtype()
    return _is_ours(numbers) and torch.can_cast(kind, out.dtype)


def _put(roots: Tensor, out: Tensor) -> Tensor:
    if out.shape != roots.shape:
        out.resize_(roots.shape)
    return out.copy_(roots)


def _is_half(exponent: Any) -> bool:
    """Where the exponent is one half, torch's power is its square root."""
    return bool(exponent == 0.5)


_REPLACEMENTS: dict[str, Callable[[Replaced], Replaced]] = {
    "sqrt": _root,
    "sqrt_": _root_in_place,
    "sqrt.out": _root_into,
    "pow.Tensor_Scalar": _power,
    "pow_.Scalar": _power_in_place,
    "pow.Tensor_Scalar_out": _power_into,
}
