"""The long accumulator of benchmarks.order_invariant: exact, rounded once, in any order."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from benchmarks.order_invariant import accumulate, rounded

COUNT = 500


def nearest(exact: Fraction) -> float:
    """The float32 nearest to a fraction, ties to even."""
    if not exact:
        return 0.0
    exponent = max(math.frexp(float(abs(exact)))[1] - 24, -149)
    whole, rest = divmod(abs(exact), Fraction(2) ** exponent)
    half = Fraction(2) ** exponent / 2
    up = rest > half or (rest == half and whole % 2 == 1)
    return math.copysign(math.ldexp(int(whole) + up, exponent), exact)


def any_bits(generator: torch.Generator) -> Tensor:
    """Finite float32 of all sizes, subnormal ones too."""
    bits = torch.randint(-(2**31), 2**31, (COUNT,), generator=generator).to(torch.int32).view(torch.float32)
    return torch.where(bits.abs() < 1e38, bits, torch.zeros(()))


def summands(kind: str) -> list[Tensor]:
    """What is added up, element by element."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(COUNT, generator=generator)
    if kind == "any bits":
        return [any_bits(generator) for _ in range(3)]
    if kind == "gradients":
        return [torch.randn(COUNT, generator=generator) for _ in range(8)]
    if kind == "cancelling":
        large = any_bits(generator)
        return [large, -large, normal * 1e-40]
    return [normal, normal * 2.0**-24, normal * 2.0**-25, normal.sign() * 2.0**-60]


@pytest.mark.parametrize("kind", ["any bits", "gradients", "cancelling", "halfway"])
def test_a_sum_is_exact_and_rounded_once_in_any_order(kind: str) -> None:
    parts = summands(kind)
    expected = [
        nearest(sum(map(Fraction, column), Fraction())) for column in zip(*(p.tolist() for p in parts), strict=True)
    ]
    for order in (parts, parts[::-1]):
        digits = torch.zeros_like(accumulate(order[0]))
        for part in order:
            digits += accumulate(part)
        assert rounded(digits).tolist() == expected


def test_what_has_no_place_is_refused() -> None:
    with pytest.raises(ValueError, match="infinities and NaN"):
        accumulate(torch.tensor([1.0, math.inf]))
