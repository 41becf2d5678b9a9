"""Medians with their intervals, and the one test that says "beyond noise".

**Beyond noise.** Two ways A and B of doing the same work are timed in interleaved rounds (A B, B A, A B, ...), so that
what the machine does meanwhile falls on both. Each round gives one ratio A/B. The figure is the median of the ratios.
That the true median is above (or below) a limit is shown by the sign test: if it were not, each round would lie above
the limit with a probability of at most one half, so the number of rounds above it is compared with that of heads among
as many tosses of a coin. p is the exact two-sided probability of so many heads or more, whatever the distribution of
the rounds, as long as they are independent. A round that equals the limit counts as one against.

**The family.** Where many tests are made, one succeeds by chance. The family is every interval that bears a verdict on
the page of all claims; how many these can be (FAMILY) is fixed beforehand. Holm's procedure keeps the probability that
even one of them is taken for beyond noise by chance at FAMILY_ERROR: the smallest p of m must be at most FAMILY_ERROR /
m, the next one at most FAMILY_ERROR / (m - 1), and so on until the first that is not. A claim that is measured alone
has to keep to the strictest step.

**Rounds.** With n rounds p cannot fall below 2 / 2**n. How many rounds the strictest step needs follows from FAMILY and
FAMILY_ERROR alone, before anything is measured: ROUNDS has them for the quick measurement, in which all have to agree,
and for the full one, in which two may lie on the other side.

The interval of a median goes from the k-th smallest to the k-th largest value. It holds the true median with the
probability 1 - 2 P(X < k), X being the number of heads among n tosses; k is the largest for which this probability, the
level, is at least 1 - p for the p that is allowed. So an interval leaves out a limit exactly when the test succeeds.

Sources: W. R. Thompson, "On confidence ranges for the median and other expectation distributions for populations of
unknown distribution form", Annals of Mathematical Statistics 7, 1936; H. A. David, H. N. Nagaraja, "Order Statistics",
2003, section 7.1; S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of
Statistics 6, 1979; T. Kalibera, R. Jones, "Rigorous benchmarking in reasonable time", ISMM 2013 (a ratio with an
interval rather than two numbers).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import comb
from statistics import median

from ddp_lab.records import Bounds, Figure, Line, Verdict

FAMILY_ERROR = 0.05
FAMILY = 37
"""The most intervals that can bear a verdict on the page of all claims: the sum of every `Claim.tests`."""
STRICTEST = FAMILY_ERROR / FAMILY
"""The p that Holm's first step allows."""


def fewest_rounds(against: int = 0, allowed: float = STRICTEST) -> int:
    """The fewest rounds whose p is at most `allowed` where so many of them lie on the other side."""
    rounds = against + 1
    while 2 * heads_at_most(against, rounds) > allowed:
        rounds += 1
    return rounds


def heads_at_most(heads: int, tosses: int) -> float:
    """The probability of at most so many heads among so many tosses of a coin."""
    return float(sum(comb(tosses, each) for each in range(heads + 1)) / 2**tosses)


ROUNDS = (fewest_rounds(0), fewest_rounds(2))
"""Rounds, or seeds, of the quick and of the full measurement."""
_allowed: ContextVar[float] = ContextVar("allowed", default=STRICTEST)


@contextmanager
def allowing(p: float) -> Iterator[None]:
    """Judge by this p, the one that Holm's procedure has reached for a whole family, instead of the strictest."""
    token = _allowed.set(p)
    try:
        yield
    finally:
        _allowed.reset(token)


def holm(p_values: Sequence[float], family: int = FAMILY) -> float:
    """The p up to which Holm's procedure takes these tests for beyond noise.

    Raises ValueError where there are more tests than the family was to have.
    """
    if len(p_values) > family:
        raise ValueError(f"{len(p_values)} tests, but the family was fixed at {family}")
    taken = 0
    for p in sorted(p_values):
        if p > FAMILY_ERROR / (family - taken):
            break
        taken += 1
    return FAMILY_ERROR / max(1, family - taken)


@dataclass(frozen=True)
class Interval:
    """A median with the interval that holds the true one with probability `level`, whatever the distribution."""

    value: float
    low: float
    high: float
    count: int
    level: float
    values: Sequence[float] = field(repr=False)

    def p(self, limit: float) -> float:
        """The exact two-sided p of the sign test against a limit."""
        above, below = (sum(sign * (value - limit) > 0 for value in self.values) for sign in (1, -1))
        return min(1.0, 2 * heads_at_most(self.count - max(above, below), self.count))

    def above(self, limit: float = 1.0) -> bool:
        """Beyond noise above a limit."""
        return self.value > limit and self.p(limit) <= _allowed.get()

    def below(self, limit: float = 1.0) -> bool:
        """Beyond noise below a limit."""
        return self.value < limit and self.p(limit) <= _allowed.get()

    def side(self, limit: float = 1.0, above: Verdict = "confirmed", below: Verdict = "refuted") -> Verdict:
        """The verdict for an interval above a limit or below it; inconclusive where that is not beyond noise."""
        return above if self.above(limit) else below if self.below(limit) else "inconclusive"

    def figure(
        self,
        name: str,
        unit: str = "",
        part: str = "",
        stand_in: str = "",
        against: float | None = None,
        bounds: Bounds | None = None,
    ) -> Figure:
        """The median as a figure of a judgement, with its interval and level; with p where it bears a verdict.

        `against` is the limit of the test that bears the verdict.
        """
        p = None if against is None else self.p(against)
        ends = (self.low, self.high, self.level)
        return Figure(name, self.value, unit, *ends, part, stand_in, bounds, against, p, self.count)

    def __str__(self) -> str:
        """The median and its interval, with as many digits as tell its ends from 1."""
        for digits in range(3, 8):
            low, high = (f"{end:.{digits}g}" for end in (self.low, self.high))
            if all(float(shown) != 1 or end == 1 for shown, end in ((low, self.low), (high, self.high))):
                break
        return f"{self.value:.3g} ({low} to {high})"


def median_interval(values: Sequence[float]) -> Interval:
    """The median of independent measurements with its interval. Raises ValueError for an empty sequence."""
    if not values:
        raise ValueError("no values to take a median of")
    ordered = sorted(values)
    count = len(ordered)
    place = 1
    while 2 * (place + 1) <= count and level_reached(count, place + 1) >= 1 - _allowed.get():
        place += 1
    low, high = ordered[place - 1], ordered[count - place]
    return Interval(float(median(ordered)), float(low), float(high), count, level_reached(count, place), ordered)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """The median over rounds of numerator / denominator, with its interval.

    Both sequences go by round. Raises ValueError where they differ in length or are empty.
    """
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} rounds against {len(denominators)}")
    return median_interval([above / below for above, below in zip(numerators, denominators, strict=True)])


def milliseconds(seconds: Sequence[float], steps: int = 1) -> Interval:
    """The median of a step, in ms, from the seconds of rounds of so many steps."""
    return median_interval([1000 * taken / steps for taken in seconds])


def line(name: str, intervals: Iterable[Interval]) -> Line:
    """A line of medians with the band of their intervals."""
    ends = [(one.value, one.low, one.high) for one in intervals]
    return Line(name, *map(list, zip(*ends, strict=True)))


def level_reached(count: int, place: int) -> float:
    """The probability that the true median lies between the `place`-th smallest and largest of `count` values."""
    return 1 - 2 * heads_at_most(place - 1, count)


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
