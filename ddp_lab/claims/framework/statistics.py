"""Medians with their intervals, and the one test that says "beyond noise".

**Beyond noise.** Two ways A and B of doing the same work are timed in interleaved rounds (A B, B A, A B, ...), so that
what the machine does meanwhile falls on both. Each round gives one ratio A/B. The figure is the median of the ratios;
its interval is the percentile bootstrap over rounds (20,000 resamples, 99 %). A difference is beyond noise when that
interval leaves out 1, and there were at least five rounds.

Sources: B. Efron, R. Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13 (percentile interval); T.
Kalibera, R. Jones, "Rigorous benchmarking in reasonable time", ISMM 2013 (a ratio with an interval rather than two
numbers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 20_000
CONFIDENCE = 0.99
FEWEST_ROUNDS = 5


@dataclass(frozen=True)
class Interval:
    """A median with the interval that the bootstrap gives it."""

    value: float
    low: float
    high: float
    count: int

    def leaves_out(self, value: float) -> bool:
        """Whether a value is outside, and the interval rests on enough rounds to say so."""
        return self.count >= FEWEST_ROUNDS and not self.low <= value <= self.high

    @property
    def above_one(self) -> bool:
        """Beyond noise, and greater than 1."""
        return self.leaves_out(1.0) and self.value > 1

    @property
    def below_one(self) -> bool:
        """Beyond noise, and less than 1."""
        return self.leaves_out(1.0) and self.value < 1

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def median_interval(values: Sequence[float]) -> Interval:
    """The median of some measurements with its bootstrap interval. Raises ValueError for an empty sequence."""
    data = np.asarray(values, dtype=np.float64)
    if not len(data):
        raise ValueError("no values to take a median of")
    medians = np.median(data[_resamples(len(data))], axis=1)
    return _interval(float(np.median(data)), medians, len(data))


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """The median over rounds of numerator / denominator, with its bootstrap interval.

    Both sequences go by round. Raises ValueError where they differ in length or are empty.
    """
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} rounds against {len(denominators)}")
    return median_interval([above / below for above, below in zip(numerators, denominators, strict=True)])


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope by Theil-Sen: the median of all pairwise slopes, which one slow round cannot move.

    Source: P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", JASA 63, 1968. Raises
    ValueError where all x are equal.
    """
    slopes = [(y[j] - y[i]) / (x[j] - x[i]) for i in range(len(x)) for j in range(i + 1, len(x)) if x[i] != x[j]]
    if not slopes:
        raise ValueError("a line needs two different x")
    slope = float(np.median(slopes))
    return float(np.median([b - slope * a for a, b in zip(x, y, strict=True)])), slope


def _resamples(count: int) -> NDArray[np.int64]:
    # A fixed seed: the same measurements always get the same interval, so judging again changes nothing.
    generator: Any = np.random.default_rng(20_250_424)
    indices: NDArray[np.int64] = generator.integers(0, count, (RESAMPLES, count))
    return indices


def _interval(value: float, resampled: NDArray[np.float64], count: int) -> Interval:
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return Interval(value, float(low), float(high), count)
