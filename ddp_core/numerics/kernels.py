"""Kernels that replace those of torch with which unlike CPUs give unlike bits in spite of the limits.

torch takes square roots from MKL, whose result is not the nearest number: it is off by the last bit for one float32
number in five, on each CPU for others. IEEE 754 asks for the nearest number, and the CPU's own instruction, which numpy
uses, gives it. The replacement is made in torch's dispatcher, so that models, optimizers, backward passes and torch's
own compositions all get it. float16 and bfloat16 need none: torch computes their roots as float32 and rounds, which
gives the nearest number for so few bits. Complex roots are left as they are.

Operations that differ and have no replacement are among those of which a run warns (known.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.library import Library, get_kernel

from ddp_core.base.errors import UserError
from ddp_core.numerics.attention import ATTENTION, attention
from ddp_core.numerics.chains import several_threads
from ddp_core.numerics.limits import limits_hold, limits_missed
from ddp_core.numerics.products import PRODUCTS, Kernel, in_place, into

_OURS = (torch.float32, torch.float64)
_HALF: tuple[tuple[float, ...], ...] = ((), (0.5,))
"""The exponent of a square root, as the operation's further arguments: none for `sqrt`, one half for `pow`."""


@contextmanager
def portable_kernels() -> Iterator[None]:
    """While in the block, torch computes with the portable kernels, in the whole process.

    Torch then has one thread. As many as it had before compute large products of matrices. Raises UserError where torch
    was loaded without the limits.
    """
    if not limits_hold():
        raise UserError(limits_missed())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    library = Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            # torch warns that kernels are replaced, which is meant.
            warnings.simplefilter("ignore")
            for name, replacement in {**_ROOTS, **PRODUCTS, **ATTENTION}.items():
                usual = get_kernel(name, "CPU").call_boxed
                library.impl(name.removeprefix("aten::"), partial(replacement, usual), "CPU", with_keyset=True)
            # A composition of operations: torch keeps it in another place, and for every device.
            usual = get_kernel("aten::scaled_dot_product_attention", "CPU").call_boxed
            library.impl(
                *("scaled_dot_product_attention", partial(attention, usual), "CompositeImplicitAutograd"),
                with_keyset=True,
            )
        with several_threads(threads):
            yield
    finally:
        del library  # torch then has its own kernels again
        torch.set_num_threads(threads)


def _root(usual: Kernel, keys: Any, numbers: Tensor, *exponent: Any) -> Any:
    """The square root, rounded to the nearest, also as the power whose exponent is one half.

    Like torch's own, it has the shape and strides of `numbers`, and torch's default dtype for whole numbers.
    """
    is_whole = not (numbers.is_floating_point() or numbers.is_complex())
    kind = torch.get_default_dtype() if is_whole else numbers.dtype
    if exponent not in _HALF or kind not in _OURS:
        return usual(keys, numbers, *exponent)
    numbers = numbers.to(kind)
    roots = torch.empty_like(numbers)
    # A negative number has no root: NaN, without a warning, as from torch.
    with np.errstate(invalid="ignore"):
        np.sqrt(numbers.detach().numpy(), out=roots.numpy())
    return roots


_ROOTS: dict[str, Kernel] = {
    "aten::sqrt": _root,
    "aten::sqrt_": in_place(_root),
    "aten::sqrt.out": into(_root, casts=True),
    "aten::pow.Tensor_Scalar": _root,
    "aten::pow_.Scalar": in_place(_root),
    "aten::pow.Tensor_Scalar_out": into(_root, casts=True),
}
