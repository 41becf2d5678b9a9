"""The intervals by which the rules of the claims tell a difference from noise."""

from __future__ import annotations

import numpy as np
import pytest

from ddp_lab.claims.framework.statistics import (
    CONFIDENCE,
    FEWEST_ROUNDS,
    difference_interval,
    fit_line,
    level_reached,
    median_interval,
    ratio_interval,
)


def test_a_clear_difference_is_beyond_noise() -> None:
    ratio = ratio_interval([2.0, 2.1, 1.9, 2.0, 2.05, 1.95, 2.0, 2.0], [1.0] * 8)
    assert ratio.above_one
    assert not ratio.below_one
    assert ratio.low <= ratio.value == 2.0 <= ratio.high


def test_noise_is_not() -> None:
    ratio = ratio_interval([1.0, 1.3, 0.8, 1.1, 0.9, 1.2, 0.7, 1.0], [1.0] * 8)
    assert not ratio.above_one
    assert not ratio.below_one


def test_few_rounds_say_nothing_and_tell_the_level_that_they_reach() -> None:
    few = ratio_interval([2.0] * (FEWEST_ROUNDS - 1), [1.0] * (FEWEST_ROUNDS - 1))
    assert not few.above_one
    assert few.level == 1 - 2 / 2**7 < CONFIDENCE
    assert median_interval([2.0] * 5).level == 0.9375
    assert ratio_interval([2.0] * FEWEST_ROUNDS, [1.0] * FEWEST_ROUNDS).above_one


# From printed tables of the sign test: the smallest and largest of 8; the 3rd of 15; the 5th of 21; the 8th of 30.
@pytest.mark.parametrize(("count", "place"), [(8, 1), (15, 3), (21, 5), (30, 8)])
def test_the_interval_goes_from_one_rank_to_its_mirror_image(count: int, place: int) -> None:
    values = [float(value) for value in range(1, count + 1)]
    found = median_interval(values[::-1])
    assert (found.low, found.high) == (place, count + 1 - place)
    assert level_reached(count, place) >= CONFIDENCE > level_reached(count, place + 1)


def test_the_figure_is_the_median_and_no_mean() -> None:
    assert median_interval([1.0, 1.0, 1.0, 1.0, 1000.0, 1.0, 1.0, 1.0]).value == 1.0


@pytest.mark.parametrize("count", [8, 11, 21])
@pytest.mark.parametrize("shape", ["normal", "lognormal", "two heights", "cauchy"])
def test_the_true_median_is_inside_as_often_as_the_level_says(count: int, shape: str) -> None:
    draws = np.random.default_rng(7).standard_normal((4000, count))
    made = {
        "normal": lambda: draws,
        "lognormal": lambda: np.exp(2 * draws) - 1,
        "two heights": lambda: draws + 20 * (draws > 1),
        "cauchy": lambda: np.tan(np.pi * (np.random.default_rng(7).random((4000, count)) - 0.5)),
    }[shape]()
    found = [median_interval(row) for row in made.tolist()]
    level = found[0].level
    missed_below = sum(one.low > 0 for one in found)
    missed_above = sum(one.high < 0 for one in found)
    # Four standard deviations of a binomial count: the seed is fixed, and another one would pass as well.
    allowed = 4000 * (1 - level) / 2 + 4 * (4000 * (1 - level) / 2) ** 0.5
    assert missed_below <= allowed
    assert missed_above <= allowed
    assert missed_below + missed_above >= 4000 * (1 - level) - 4 * (4000 * (1 - level)) ** 0.5


def test_a_slow_round_falls_on_both_sides() -> None:
    assert ratio_interval([2.0, 20.0, 2.0, 2.0, 2.0], [1.0, 10.0, 1.0, 1.0, 1.0]).value == 2.0


def test_seeds_go_in_pairs() -> None:
    better = difference_interval([float(seed) for seed in range(8)], [seed - 0.5 for seed in range(8)])
    assert (better.value, better.low, better.high) == (0.5, 0.5, 0.5)
    assert better.above(0.0)
    assert not better.below(0.5)


def test_misuse() -> None:
    with pytest.raises(ValueError, match="rounds"):
        ratio_interval([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="values"):
        difference_interval([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no values"):
        median_interval([])
    with pytest.raises(ValueError, match="two different"):
        fit_line([1, 1], [1, 2])


def test_a_line_is_not_moved_by_one_slow_point() -> None:
    intercept, slope = fit_line([1, 2, 3, 4, 5, 6, 7], [3, 5, 7, 900, 11, 13, 15])
    assert (intercept, slope) == pytest.approx((1, 2))
