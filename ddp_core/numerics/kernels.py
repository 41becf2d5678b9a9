"""Kernels that replace those of torch with which unlike CPUs give unlike bits in spite of the limits.

torch takes square roots from MKL, whose result is not the nearest number: it is off by the last bit for one float32
number in five, on each CPU for others. IEEE 754 asks for the nearest number, and the CPU's own instruction, which numpy
uses, gives it. The replacement is made in torch's dispatcher, so that models, optimizers, backward passes and torch's
own compositions all get it. float16 and bfloat16 need none: torch computes their roots as float32 and rounds, which
gives the nearest number for so few bits. Complex roots are left as they are.

Products of int8 matrices (`torch._int_mm`) come from oneDNN, which under the limits adds pairs of products in 16 bits
and cuts off what does not fit: the result is wrong beyond +-64, on each kind of CPU another. Here they are computed in
float64, which holds all of their sums, so that any order of additions gives the exact integers.

Where no replacement is known, the operation is refused with one line that names it and where it is used.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.library import Library, get_kernel

from ddp_core.base.errors import UserError
from ddp_core.numerics.attention import ATTENTION, attention
from ddp_core.numerics.chains import several_threads
from ddp_core.numerics.limits import limits_hold, limits_missed
from ddp_core.numerics.products import PRODUCTS, Kernel, written

_OURS = (torch.float32, torch.float64)
_HALF: tuple[tuple[float, ...], ...] = ((), (0.5,))
"""The exponent of a square root, as the operation's further arguments: none for `sqrt`, one half for `pow`."""

_LEAST_SQUARES = ("torch.linalg.lstsq", "its bits depend on where its tensors lie in memory; use torch.linalg.qr")
_EIGHT_BITS = (
    "a quantized layer",
    "CPUs without VNNI cut off sums of two products of 8 bits; use torch.ao.nn.quantized.dynamic.Linear, or let "
    "reduce_range be true, which leaves 7 bits",
)
_CONVOLUTIONS = [
    *("conv1d", "conv1d_relu", "conv2d", "conv2d.new", "conv2d_relu", "conv2d_relu.new", "conv2d_add"),
    *("conv2d_add_relu", "conv3d", "conv3d.new", "conv3d_relu", "conv3d_relu.new"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
]
_LINEAR_LAYERS = ["linear", "linear_relu", "linear_leaky_relu", "linear_tanh", "matmul"]
_BY_RANGE = [
    *("linear_dynamic", "linear_relu_dynamic", "conv1d_dynamic", "conv2d_dynamic", "conv3d_dynamic"),
    *("conv_transpose1d_dynamic", "conv_transpose2d_dynamic", "conv_transpose3d_dynamic"),
]
"""Layers whose inputs are quantized when they are called: refused with 8 bits, and not with 7."""

_OF_COMPILED = [
    *("qlinear_pointwise", "qlinear_pointwise.tensor", "qlinear_pointwise.binary", "qlinear_pointwise.binary_tensor"),
    *("qconv_pointwise", "qconv_pointwise.tensor", "qconv2d_pointwise.binary", "qconv2d_pointwise.binary_tensor"),
]
REFUSED: Mapping[str, tuple[str, str]] = {
    "aten::linalg_lstsq": _LEAST_SQUARES,
    "aten::linalg_lstsq.out": _LEAST_SQUARES,
    **{f"quantized::{name}": _EIGHT_BITS for name in (*_LINEAR_LAYERS, *_CONVOLUTIONS, *_BY_RANGE)},
    **{f"onednn::{name}": _EIGHT_BITS for name in _OF_COMPILED},
}
"""By the dispatcher's name of an operation: the name that users know, and why it is refused and what to do instead.

Least squares and linear layers were measured to differ: docs/reference/portable-numerics.md. The others multiply 8 bits
by the same instructions.
"""


@contextmanager
def portable_kernels() -> Iterator[None]:
    """While in the block, torch computes with the portable kernels, in the whole process.

    Torch then has one thread. As many as it had before compute large products of matrices. Raises UserError where torch
    was loaded without the limits. An operation that cannot be had raises UserError when it is called.
    """
    if not limits_hold():
        raise UserError(limits_missed())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    libraries = {name: Library(name, "IMPL") for name in ("aten", "quantized", "onednn")}
    try:
        with warnings.catch_warnings():
            # torch warns that kernels are replaced, which is meant.
            warnings.simplefilter("ignore")
            for name, replacement in {**_REPLACEMENTS, **PRODUCTS, **ATTENTION}.items():
                library, _, operation = name.partition("::")
                usual = get_kernel(name, "CPU").call_boxed
                libraries[library].impl(operation, partial(replacement, usual), "CPU", with_keyset=True)
            # A composition of operations: torch keeps it in another place, and for every device.
            usual = get_kernel("aten::scaled_dot_product_attention", "CPU").call_boxed
            libraries["aten"].impl(
                *("scaled_dot_product_attention", partial(attention, usual), "CompositeImplicitAutograd"),
                with_keyset=True,
            )
            for name in REFUSED.keys() - _REPLACEMENTS.keys():
                library, _, operation = name.partition("::")
                key = "QuantizedCPU" if library == "quantized" else "CPU"
                libraries[library].impl(operation, partial(_refuse, name), key)
        with several_threads(threads):
            yield
    finally:
        libraries.clear()  # torch then has its own kernels again
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


def _root(usual: Kernel, keys: Any, numbers: Tensor, *exponent: Any) -> Any:
    """Both the square root and the power, which is a square root where the exponent is one half.

    `usual` is torch's own kernel, here and in the kernels below.
    """
    is_root = exponent in _HALF and _is_ours(numbers)
    return exact_root(numbers) if is_root else usual(keys, numbers, *exponent)


def _root_in_place(usual: Kernel, keys: Any, numbers: Tensor, *exponent: Any) -> Any:
    is_root = exponent in _HALF and numbers.dtype in _OURS
    return numbers.copy_(exact_root(numbers)) if is_root else usual(keys, numbers, *exponent)


def _root_into(usual: Kernel, keys: Any, numbers: Tensor, *exponent: Any, out: Tensor) -> Any:
    # Where `out` cannot hold the root, torch's own kernel says why.
    kind = numbers.dtype if numbers.is_floating_point() else torch.get_default_dtype()
    if exponent not in _HALF or not _is_ours(numbers) or not torch.can_cast(kind, out.dtype):
        return usual(keys, numbers, *exponent, out=out)
    return written(out, exact_root(numbers))


def _is_ours(numbers: Tensor) -> bool:
    """Whether torch would take the root of these numbers from MKL."""
    kind = numbers.dtype
    is_whole = not (kind.is_floating_point or kind.is_complex)
    return (torch.get_default_dtype() if is_whole else kind) in _OURS


def _integers(usual: Kernel, keys: Any, left: Tensor, right: Tensor) -> Any:
    if not _can_multiply(left, right):
        return usual(keys, left, right)  # torch's own kernel says why
    return _exact_product(left, right)


def _integers_into(usual: Kernel, keys: Any, left: Tensor, right: Tensor, *, out: Tensor) -> Any:
    fits = _can_multiply(left, right) and out.dtype == torch.int32 and out.shape == (len(left), right.shape[1])
    return out.copy_(_exact_product(left, right)) if fits else usual(keys, left, right, out=out)


def _can_multiply(left: Tensor, right: Tensor) -> bool:
    are_matrices = left.dim() == right.dim() == 2 and left.dtype == right.dtype == torch.int8
    return are_matrices and left.shape[1] == right.shape[0]


def _exact_product(left: Tensor, right: Tensor) -> Tensor:
    """The product of int8 matrices, exact in int32; a sum that int32 does not hold begins anew at its other end."""
    return (left.double() @ right.double()).to(torch.int64).to(torch.int32)


def _seven_bits(
    operation: str, usual: Kernel, keys: Any, inputs: Tensor, weight: Any, reduce_range: bool = False
) -> Any:
    """A layer whose inputs are quantized when it is called: to 7 bits, or not at all."""
    return usual(keys, inputs, weight, reduce_range) if reduce_range else _refuse(operation)


_REPLACEMENTS: dict[str, Kernel] = {
    "aten::sqrt": _root,
    "aten::sqrt_": _root_in_place,
    "aten::sqrt.out": _root_into,
    "aten::pow.Tensor_Scalar": _root,
    "aten::pow_.Scalar": _root_in_place,
    "aten::pow.Tensor_Scalar_out": _root_into,
    "aten::_int_mm": _integers,
    "aten::_int_mm.out": _integers_into,
    **{f"quantized::{name}": partial(_seven_bits, f"quantized::{name}") for name in _BY_RANGE},
}


def _refuse(operation: str, *_: Any, **__: Any) -> NoReturn:
    """The kernel of a refused operation: raises UserError."""
    name, reason = REFUSED[operation]
    raise UserError(
        f"{name} in {_place()} is not portable: {reason}. Or train with --numerics native, whose bits belong to "
        "one kind of CPU"
    )


def _place() -> str:
    """Where the operation was called: in which module of the model, in a backward pass, or in which line."""
    modules: list[nn.Module] = []
    line = None
    for frame, number in traceback.walk_stack(sys._getframe()):
        names = frame.f_code
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            modules += [owner] if not modules or modules[-1] is not owner else []
        elif names.co_name == "backward" and _is_of_torch(frame) and not modules:
            return "the backward pass"
        if line is None and not _is_of_torch(frame) and Path(names.co_filename) != Path(__file__):
            line = f"{names.co_filename}, line {number}"
    if not modules:
        return line or "code outside of Python"
    module, whole = modules[0], modules[-1]
    name = next((name for name, each in whole.named_modules() if each is module), "")
    kind = type(module).__name__
    return f"module {name} ({kind})" if name else f"module {kind}"


def _is_of_torch(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"
