"""Fit the model to what was measured, and say how far it is off where it was not fitted.

time = latency * messages + bytes / bandwidth, each times max(1, busy ranks / cores): ranks that share cores take turns.
On loopback these cores also copy the bytes, fast while they fit a cache and slower beyond it. So there are two
bandwidths; the fit chooses the size where the second one begins, the knee. Errors count relative to the time, so that
small messages matter as much as large ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_lab.projection.costs import Collective, busy_ranks, steps_and_shares

KNEES = tuple(2**exponent for exponent in range(18, 26))
TARGET = 0.15


@dataclass(frozen=True)
class Point:
    """Seconds of one collective on tensors of `size` bytes."""

    collective: Collective
    ranks: int
    size: int
    seconds: float


@dataclass(frozen=True)
class Fitted:
    """One collective's constants on this machine: seconds per message, seconds per byte below and above the knee."""

    collective: Collective
    cores: int
    latency: float
    per_byte: float
    per_byte_beyond: float
    knee: int

    def seconds(self, ranks: int, size: float) -> float:
        """The time that the model predicts."""
        features = _features(self.collective, ranks, size, self.cores, self.knee)
        return float(features @ np.array([self.latency, self.per_byte, self.per_byte_beyond]))

    def to_json(self) -> dict[str, Any]:
        """The constants as plain JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class Check:
    """Relative errors of a model on points: median and largest absolute value, and each point's with its sign."""

    median: float
    largest: float
    errors: tuple[tuple[Point, float], ...]

    @property
    def passed(self) -> bool:
        """Whether the median error is within the target."""
        return self.median <= TARGET


def fit(points: Sequence[Point], cores: int) -> Fitted:
    """Least squares of the relative error with constants that cannot be negative. Raises ValueError for no points."""
    if not points:
        raise ValueError("no points to fit")
    collective = points[0].collective
    seconds = np.array([point.seconds for point in points])
    best: tuple[float, Fitted] | None = None
    for knee in KNEES:
        rows = np.stack([_features(collective, point.ranks, point.size, cores, knee) for point in points])
        constants, error = _non_negative(rows / seconds[:, None], np.ones(len(points)))
        if best is None or error < best[0]:
            latency, per_byte, beyond = (float(constant) for constant in constants)
            best = error, Fitted(collective, cores, latency, per_byte, beyond, knee)
    assert best is not None
    return best[1]


def check(model: Fitted, points: Sequence[Point]) -> Check:
    """How far the model is off on these points. Raises ValueError for no points."""
    if not points:
        raise ValueError("no points to check on")
    errors = [(point, model.seconds(point.ranks, point.size) / point.seconds - 1) for point in points]
    sizes = [abs(error) for _, error in errors]
    return Check(float(np.median(sizes)), max(sizes), tuple(errors))


def split(
    points: Sequence[Point], held_out_ranks: Sequence[int], held_out_sizes: Sequence[int]
) -> tuple[list[Point], list[Point]]:
    """Points to fit on, and points that the fit must not see: some numbers of ranks, and sizes on the others."""
    held = [point for point in points if point.ranks in held_out_ranks or point.size in held_out_sizes]
    return [point for point in points if point not in held], held


def _features(collective: Collective, ranks: int, size: float, cores: int, knee: int) -> NDArray[np.float64]:
    messages, shares = steps_and_shares(collective, ranks)
    turns = max(1.0, busy_ranks(collective, ranks) / cores)
    # The ranks share a cache, so the tensors of all ranks together must fit.
    fits = min(size, knee / ranks)
    return np.array([messages * turns, shares * fits * turns, shares * (size - fits) * turns])


def _non_negative(rows: NDArray[np.float64], wanted: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Least squares over x >= 0, by trying which of the three constants are zero."""
    count = rows.shape[1]
    best = np.zeros(count), float(wanted @ wanted)
    for kept in (group for size in range(1, count + 1) for group in combinations(range(count), size)):
        part, *_ = np.linalg.lstsq(rows[:, kept], wanted, rcond=None)
        if (part < 0).any():
            continue
        difference = rows[:, kept] @ part - wanted
        error = float(difference @ difference)
        if error < best[1]:
            constants = np.zeros(count)
            constants[list(kept)] = part
            best = constants, error
    return best
