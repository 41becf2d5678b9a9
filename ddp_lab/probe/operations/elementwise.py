"""Operations that compute each number from one number, or a few, at the same place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ddp_lab.probe.operations.inputs import Operations, backward, numbers, positive

_LENGTH = 1003
"""Not a multiple of any vector's length, so that the code for the rest of a vector is seen, too."""


def elementwise() -> Operations:
    """The operations by name."""
    wide, narrow = partial(numbers, _LENGTH, scale=8), partial(numbers, _LENGTH, key=1)
    above, one = partial(positive, _LENGTH, scale=64), partial(positive, _LENGTH, key=2)
    of_any = ["exp", "exp2", "expm1", "sin", "cos", "tan", "atan", "sinh", "cosh", "tanh", "asinh", "sigmoid", "erf"]
    of_any += ["erfc", "reciprocal", "square", "abs", "floor", "round", "trunc", "sign", "frac"]
    of_positive = ["log", "log2", "log10", "log1p", "sqrt", "rsqrt", "lgamma", "digamma"]
    of_narrow = ["asin", "acos", "atanh", "erfinv"]
    powers = {f"pow {exponent}": partial(torch.pow, exponent=exponent) for exponent in (-0.5, 0.5, 1.7, 2, 3)}
    activations: dict[str, Callable[[Tensor], Tensor]] = {
        **{
            name: getattr(functional, name)
            for name in ("relu", "gelu", "silu", "softplus", "mish", "elu", "selu", "leaky_relu", "hardswish")
        },
        "gelu tanh": partial(functional.gelu, approximate="tanh"),
        "logsigmoid": functional.logsigmoid,
        "celu": functional.celu,
    }
    found: dict[str, Callable[[], object]] = {}
    for names, inputs in ((of_any, wide), (of_positive, above), (of_narrow, narrow)):
        found |= {name: partial(_both, getattr(torch, name), inputs) for name in names}
    found |= {name: partial(_both, function, above) for name, function in powers.items()}
    differentiated: dict[str, tuple[Any, ...]] = {name: (function, wide()) for name, function in activations.items()}
    differentiated["prelu"] = (functional.prelu, wide(), numbers(1, key=3))
    differentiated |= {"glu": (functional.glu, numbers(17, 62, scale=8)), "sqrt": (torch.sqrt, above())}
    found |= backward(differentiated)
    doubles = ("exp", "log", "sin", "cos", "tanh", "sqrt")
    found |= {f"{name} float64": partial(_doubled, getattr(torch, name), above) for name in doubles}
    found |= {f"{name} bfloat16": partial(_halved, getattr(torch, name), above) for name in ("exp", "tanh", "sqrt")}
    return found | {
        "add, multiply, divide": lambda: [wide() + above(), wide() * above(), wide() / above()],
        "add with alpha": lambda: torch.add(wide(), above(), alpha=0.3),
        "lerp": lambda: torch.lerp(wide(), above(), 0.3),
        "addcmul": lambda: torch.addcmul(wide(), narrow(), above(), value=0.3),
        "addcdiv": lambda: torch.addcdiv(wide(), narrow(), above(), value=0.3),
        "pow of two tensors": lambda: above() ** narrow(),
        "atan2": lambda: torch.atan2(wide(), narrow()),
        "hypot": lambda: torch.hypot(wide(), narrow()),
        "fmod, remainder": lambda: [torch.fmod(wide(), one()), torch.remainder(wide(), one())],
        "logaddexp": lambda: torch.logaddexp(wide(), narrow()),
        "clamp, where, maximum": lambda: [
            wide().clamp(-1, 2),
            torch.where(wide() > 0, above(), narrow()),
            torch.maximum(wide(), narrow()),
        ],
        "sqrt of a part": lambda: positive(61, 67, scale=64)[:, ::3].sqrt(),
    }


def _both(function: Callable[[Tensor], Tensor], inputs: Callable[[], Tensor]) -> list[Tensor]:
    """A vector's result, and that of a few numbers, which other code may compute."""
    return [function(inputs()), function(inputs()[:3])]


def _doubled(function: Callable[[Tensor], Tensor], inputs: Callable[..., Tensor]) -> Tensor:
    return function(inputs(dtype=torch.float64) + 2.0**-40)


def _halved(function: Callable[[Tensor], Tensor], inputs: Callable[..., Tensor]) -> Tensor:
    return function(inputs(dtype=torch.bfloat16))
