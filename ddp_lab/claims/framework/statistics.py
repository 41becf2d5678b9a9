"""Medians with their intervals, and the one test that says "beyond noise".

**Beyond noise.** Two ways A and B of doing the same work are timed in interleaved rounds (A B, B A, A B, ...), so that
what the machine does meanwhile falls on both. Each round gives one ratio A/B. The figure is the median of the ratios;
its interval goes from the k-th smallest to the k-th largest ratio. Whatever the distribution of the rounds, as long as
they are independent, such an interval holds the true median with the probability 1 - 2 P(X < k), X being the number of
heads among n tosses of a coin. k is the largest for which this probability, the level, is at least 99 %. Seven rounds
or fewer cannot reach 99 %, not even with their whole range: the level they reach is told, and no difference is called
beyond noise.

Sources: W. R. Thompson, "On confidence ranges for the median and other expectation distributions for populations of
unknown distribution form", Annals of Mathematical Statistics 7, 1936; H. A. David, H. N. Nagaraja, "Order Statistics",
2003, section 7.1; T. Kalibera, R. Jones, "Rigorous benchmarking in reasonable time", ISMM 2013 (a ratio with an
interval rather than two numbers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

from ddp_lab.records import Figure

CONFIDENCE = 0.99
FEWEST_ROUNDS = 8
"""The fewest rounds whose range holds the median with 99 %: 1 - 2 / 2**8 is 99.2 %."""


@dataclass(frozen=True)
class Interval:
    """A median with the interval that holds the true one with probability `level`, whatever the distribution."""

    value: float
    low: float
    high: float
    count: int
    level: float

    @property
    def sure(self) -> bool:
        """Whether the level that a verdict needs is reached: enough rounds were measured."""
        return self.level >= CONFIDENCE

    def above(self, value: float) -> bool:
        """Whether the whole interval lies above a value, at a sufficient level."""
        return self.sure and self.low > value

    def below(self, value: float) -> bool:
        """Whether the whole interval lies below a value, at a sufficient level."""
        return self.sure and self.high < value

    @property
    def above_one(self) -> bool:
        """Beyond noise, and greater than 1."""
        return self.above(1.0)

    @property
    def below_one(self) -> bool:
        """Beyond noise, and less than 1."""
        return self.below(1.0)

    def figure(self, name: str, unit: str = "", part: str = "", stand_in: str = "") -> Figure:
        """The median as a figure of a judgement, with its interval and level."""
        return Figure(name, self.value, unit, self.low, self.high, self.level, part, stand_in)

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def median_interval(values: Sequence[float]) -> Interval:
    """The median of independent measurements with its interval. Raises ValueError for an empty sequence."""
    if not values:
        raise ValueError("no values to take a median of")
    ordered = sorted(values)
    count = len(ordered)
    place = 1
    while 2 * (place + 1) <= count and level_reached(count, place + 1) >= CONFIDENCE:
        place += 1
    low, high = ordered[place - 1], ordered[count - place]
    return Interval(float(median(ordered)), float(low), float(high), count, level_reached(count, place))


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """The median over rounds of numerator / denominator, with its interval.

    Both sequences go by round. Raises ValueError where they differ in length or are empty.
    """
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} rounds against {len(denominators)}")
    return median_interval([above / below for above, below in zip(numerators, denominators, strict=True)])


def difference_interval(minuends: Sequence[float], subtrahends: Sequence[float]) -> Interval:
    """The median of paired differences, with its interval: what one seed gives in two ways is a pair.

    Raises ValueError where the sequences differ in length or are empty.
    """
    if len(minuends) != len(subtrahends):
        raise ValueError(f"{len(minuends)} values against {len(subtrahends)}")
    return median_interval([first - second for first, second in zip(minuends, subtrahends, strict=True)])


def level_reached(count: int, place: int) -> float:
    """The probability that the true median lies between the `place`-th smallest and largest of `count` values."""
    return 1 - sum(comb(count, heads) for heads in range(place)) / float(2 ** (count - 1))


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope by Theil-Sen: the median of all pairwise slopes, which one slow round cannot move.

    Source: P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", JASA 63, 1968. Raises
    ValueError where all x are equal.
    """
    slopes = [(y[j] - y[i]) / (x[j] - x[i]) for i in range(len(x)) for j in range(i + 1, len(x)) if x[i] != x[j]]
    if not slopes:
        raise ValueError("a line needs two different x")
    slope = float(median(slopes))
    return float(median([b - slope * a for a, b in zip(x, y, strict=True)])), slope
