"""The plots of a claim, drawn from the series in its JSON."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_lab.records import Line as ClaimLine
from ddp_lab.records import Series
from ddp_lab.report.charts.plots import Plot, make_plot
from ddp_lab.report.charts.shapes import Axis, Line, LineChart
from ddp_lab.report.reading.claims import Claim
from ddp_lab.report.values import Column, Table, figure, finite, slug, text


def claim_plots(claim: Claim) -> list[Plot]:
    """A plot for each series of the claim that can be drawn."""
    found = (_claim_plot(claim, series, index) for index, series in enumerate(claim.series))
    return [plot for plot in found if plot is not None]


@dataclass(frozen=True)
class _Point:
    x: float
    y: float
    low: float | None
    high: float | None


def _claim_plot(claim: Claim, series: Series, index: int) -> Plot | None:
    categories = (
        [str(value) for value in series.x.values] if any(isinstance(value, str) for value in series.x.values) else []
    )
    places = (
        [float(place) for place in range(len(categories))]
        if categories
        else [finite(value) for value in series.x.values]
    )
    named = [(line.name, style + 1, _points(places, line)) for style, line in enumerate(series.lines)]
    drawn = [item for item in named if item[2]]
    joined = all(_is_number(name) for name in categories)
    # Side by side where nothing joins them: intervals at one place would hide each other.
    shifts = [0.0 if joined else 0.12 * (order - (len(drawn) - 1) / 2) for order in range(len(drawn))]
    lines = [_line(*item, shift, joined) for item, shift in zip(drawn, shifts, strict=True)]
    if not lines:
        return None
    x = Axis(series.x.name, _unit(series.x.unit))
    y = Axis(series.y.name, _unit(series.y.unit), series.y.zero)
    rows = [
        [
            text(name),
            text(categories[int(point.x)]) if categories else figure(point.x),
            *(figure(value) for value in (point.y, point.low, point.high)),
        ]
        for name, _, points in named
        for point in points
    ]
    columns = [Column("line"), Column(x.label or "x", not categories)]
    columns += [Column(title, True) for title in (y.label or "y", "low", "high")]
    name = f"claim-{slug(claim.id)}-{index + 1}"
    ticks = [] if categories else _ticks([place for line in lines for place in line.x])
    chart = LineChart(x, y, lines, categories=categories, ticks=ticks)
    return make_plot(name, series.title or claim.title, "", chart, Table(columns, rows))


def _points(places: Sequence[float | None], line: ClaimLine) -> list[_Point]:
    """The points that have both a place and a value; columns of unlike length end with the shortest."""

    def at(column: Sequence[float | None] | None, place: int) -> float | None:
        return finite(column[place]) if column is not None and place < len(column) else None

    found = []
    for place, x in enumerate(places):
        y = at(line.values, place)
        if x is not None and y is not None:
            found.append(_Point(x, y, at(line.low, place), at(line.high, place)))
    return found


def _line(name: str, style: int, points: Sequence[_Point], shift: float, joined: bool) -> Line:
    low = [point.low for point in points if point.low is not None]
    high = [point.high for point in points if point.high is not None]
    banded = len(low) == len(high) == len(points)
    x, y = [point.x + shift for point in points], [point.y for point in points]
    few = len(points) <= 12
    return Line(
        name, x, y, low if banded else None, high if banded else None, style, points=few, joined=joined or not few
    )


def _unit(word: str) -> str:
    return "times" if word == "x" else word


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _ticks(places: Sequence[float]) -> list[float]:
    """The places themselves, where they are few and far enough apart to be written below the axis."""
    found = sorted(set(places))
    gaps = [after - before for before, after in itertools.pairwise(found)]
    return found if 1 < len(found) <= 8 and min(gaps) >= 0.07 * (found[-1] - found[0]) else []
