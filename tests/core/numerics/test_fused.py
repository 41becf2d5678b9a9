"""The fused multiply-add of the definition, by which products are judged, rounds once."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from tests.support.chains import fused

SMALLEST = np.float32(2.0**-149)


def nearest(value: Fraction) -> np.float32:
    """The float32 number that is nearest to a fraction; of two as near, the one whose last bit is 0."""
    guess = np.float32(float(value))
    around = [guess, np.nextafter(guess, np.float32(-np.inf)), np.nextafter(guess, np.float32(np.inf))]
    return min(around, key=lambda each: (abs(Fraction(float(each)) - value), int(each.view(np.uint32)) & 1))


def hard_cases() -> list[tuple[np.float32, np.float32, np.float32]]:
    """Sums that lie by less than float64 can hold beside the middle of two float32 numbers, and other corners."""
    one, little = np.float32(1), np.float32(2.0**-60)
    middle = np.float32(1 + 2.0**-23), np.float32(2.0**-24)
    cases = [(little, sign * one, big) for sign in (1, -1) for big in (one, np.float32(3.5))]
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: with 2^-11 off, half of the last bit of 1 is left; then a little more or less.
    half = np.float32(1 + 2.0**-12)
    cases += [(half, half, np.float32(each)) for each in (-(2.0**-11), 2.0**-70, -(2.0**-70), 1.0, -1.0)]
    cases += [(middle[0], middle[1], np.float32(each)) for each in (1, -1, 2.0**-100, 2.0**24)]
    return [*cases, (SMALLEST, np.float32(0.5), SMALLEST), (SMALLEST, SMALLEST, SMALLEST), (half, half, -(half * half))]


def test_a_fused_multiply_add_rounds_once() -> None:
    drawn = np.random.default_rng(0)
    bits = drawn.integers(0, 2**32, (3, 20_000), dtype=np.uint32).view(np.float32)
    usual = drawn.standard_normal((3, 20_000), dtype=np.float32)
    # The addend nearly cancels the product.
    close = np.stack([usual[0], usual[1], -(usual[0] * usual[1]) * np.float32(1 + 2.0**-20)])
    cases = [tuple(column) for kind in (bits, usual, close) for column in kind.T[:3000]] + hard_cases()
    finite = [case for case in cases if np.isfinite(case).all()]
    a, b, c = (np.array(each, np.float32) for each in zip(*finite, strict=True))
    with np.errstate(over="ignore"):
        found = fused(a, b, c)
    is_held = np.isfinite(found)
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in finite]
    wrong = [
        case
        for case, ours, true, held in zip(finite, found, exact, is_held, strict=True)
        if held and ours != nearest(true)
    ]
    assert wrong == []
    assert is_held.mean() > 0.8


def test_rounding_twice_would_be_another_result() -> None:
    a = b = np.float32(1 + 2.0**-12)
    c = np.float32(2.0**-70)
    assert fused(a, b, c) == np.float32(1 + 2.0**-11 + 2.0**-23)
    assert np.float32(np.float64(a) * np.float64(b) + np.float64(c)) == np.float32(1 + 2.0**-11)
