"""The intervals by which the rules of the claims tell a difference from noise."""

from __future__ import annotations

import pytest

from ddp_lab.claims.framework import statistics
from tests.support.wording import refusing


def test_few_rounds_say_nothing_and_tell_the_level_that_they_reach() -> None:
    enough = statistics.ROUNDS[0]
    few = statistics.ratio_interval([2.0] * (enough - 1), [1.0] * (enough - 1))
    assert not few.above()
    assert few.level == 1 - 2 / 2 ** (enough - 1) < 1 - statistics.STRICTEST
    assert statistics.median_interval([2.0] * 5).level == 0.9375
    assert statistics.ratio_interval([2.0] * enough, [1.0] * enough).above()


# p of the sign test, from printed tables: 2 / 2^8; 1 of 15 on the other side; 5 of 20; 4 of 10.
@pytest.mark.parametrize(
    ("above", "below", "p"), [(8, 0, 0.0078), (14, 1, 0.00098), (15, 5, 0.0414), (6, 4, 0.7539), (5, 5, 1.0)]
)
def test_p_is_the_exact_one_of_the_sign_test(above: int, below: int, p: float) -> None:
    interval = statistics.median_interval([1.5] * above + [0.5] * below)
    assert interval.p(1.0) == pytest.approx(p, abs=6e-5)


def test_a_round_that_equals_the_limit_counts_against() -> None:
    assert statistics.median_interval([2.0] * 10 + [1.0]).p(1.0) == statistics.median_interval([2.0] * 10 + [0.5]).p(
        1.0
    )


def test_the_rounds_follow_from_the_family() -> None:
    assert [statistics.fewest_rounds(against, 0.01) for against in range(3)] == [8, 12, 15]
    assert statistics.ROUNDS == (statistics.fewest_rounds(0), statistics.fewest_rounds(2)) == (11, 18)
    assert statistics.STRICTEST == statistics.FAMILY_ERROR / statistics.FAMILY


def test_holm_by_hand() -> None:
    """Of four tests at 5 %: 0.010 <= 0.05 / 4 and 0.013 <= 0.05 / 3, but 0.030 > 0.05 / 2, which ends it."""
    assert statistics.holm([0.03, 0.01, 0.013, 0.04], 4) == 0.05 / 2
    assert statistics.holm([0.013, 0.013], 4) == 0.05 / 4
    assert statistics.holm([0.001, 0.001], 2) == 0.05
    assert statistics.holm([], 4) == 0.05 / 4
    with refusing(ValueError):
        statistics.holm([0.1] * 5, 4)


# From printed tables of the sign test: the smallest and largest of 8; the 3rd of 15; the 5th of 21; the 8th of 30.
@pytest.mark.parametrize(("count", "place"), [(8, 1), (15, 3), (21, 5), (30, 8)])
def test_the_interval_goes_from_one_rank_to_its_mirror_image(count: int, place: int) -> None:
    values = [float(value) for value in range(1, count + 1)]
    with statistics.allowing(0.01):
        found = statistics.median_interval(values[::-1])
    assert (found.low, found.high) == (place, count + 1 - place)
    assert statistics.level_reached(count, place) >= 0.99 > statistics.level_reached(count, place + 1)


def test_a_line_is_not_moved_by_one_slow_point() -> None:
    intercept, slope = statistics.fit_line([1, 2, 3, 4, 5, 6, 7], [3, 5, 7, 900, 11, 13, 15])
    assert (intercept, slope) == pytest.approx((1, 2))
