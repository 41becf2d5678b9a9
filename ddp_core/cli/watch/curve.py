"""The loss over the steps of a run of any length in little memory, and as a line of small bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

_MOST_POINTS = 512
_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-~=+*#"


class Curve:
    """Points (step, value) in the order of steps, thinned to some hundreds; a step that comes again counts anew."""

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []
        self._gap = 0

    def add(self, step: int, value: float) -> None:
        """Take a point; it takes the place of all points of this step and later ones."""
        self.roll_back(step - 1)
        if self._points and step - self._points[-1][0] < self._gap:
            return
        self._points.append((step, value))
        if len(self._points) > _MOST_POINTS:
            self._gap = max(1, 2 * (step - self._points[0][0]) // _MOST_POINTS)
            self._points = self._points[::2]

    def roll_back(self, step: int) -> None:
        """Forget the points after this step."""
        while self._points and self._points[-1][0] > step:
            self._points.pop()

    def means(self, count: int) -> list[float]:
        """The mean of each of at most `count` equal stretches of steps; of a stretch without points, that before it."""
        if not self._points or count < 1:
            return []
        first, last = self._points[0][0], self._points[-1][0]
        stretches: list[list[float]] = [[] for _ in range(min(count, len(self._points)))]
        for step, value in self._points:
            stretches[min((step - first) * len(stretches) // max(1, last - first), len(stretches) - 1)].append(value)
        means: list[float] = []
        for values in stretches:
            means.append(fmean(values) if values else means[-1])
        return means

    @property
    def first(self) -> float | None:
        """The value of the earliest point."""
        return self._points[0][1] if self._points else None


def bars(values: Sequence[float], is_ascii: bool = False) -> str:
    """One character for each value, the higher the larger it is."""
    marks = _ASCII_BARS if is_ascii else _BARS
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    low, height = min(known), max(known) - min(known)
    return "".join(marks[round((value - low) / height * (len(marks) - 1)) if height else 0] for value in known)
