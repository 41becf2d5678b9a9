"""The intervals by which the rules of the claims tell a difference from noise."""

from __future__ import annotations

import pytest

from ddp_lab.claims.framework.statistics import fit_line, median_interval, ratio_interval


def test_a_clear_difference_is_beyond_noise() -> None:
    ratio = ratio_interval([2.0, 2.1, 1.9, 2.0, 2.05, 1.95, 2.0], [1.0] * 7)
    assert ratio.above_one
    assert not ratio.below_one
    assert ratio.low <= ratio.value == 2.0 <= ratio.high


def test_noise_is_not() -> None:
    ratio = ratio_interval([1.0, 1.3, 0.8, 1.1, 0.9, 1.2, 0.7], [1.0] * 7)
    assert not ratio.above_one
    assert not ratio.below_one


def test_few_rounds_say_nothing() -> None:
    assert not ratio_interval([2.0, 2.0, 2.0, 2.0], [1.0] * 4).above_one


def test_a_slow_round_falls_on_both_sides() -> None:
    assert ratio_interval([2.0, 20.0, 2.0, 2.0, 2.0], [1.0, 10.0, 1.0, 1.0, 1.0]).value == 2.0


def test_the_same_measurements_give_the_same_interval() -> None:
    values = [1.0, 1.2, 0.9, 1.4, 1.1]
    assert median_interval(values) == median_interval(values)


def test_misuse() -> None:
    with pytest.raises(ValueError, match="rounds"):
        ratio_interval([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no values"):
        median_interval([])
    with pytest.raises(ValueError, match="two different"):
        fit_line([1, 1], [1, 2])


def test_a_line_is_not_moved_by_one_slow_point() -> None:
    intercept, slope = fit_line([1, 2, 3, 4, 5, 6, 7], [3, 5, 7, 900, 11, 13, 15])
    assert (intercept, slope) == pytest.approx((1, 2))
