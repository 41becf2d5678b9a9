"""The plots of a claim, drawn from the series in its JSON."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from ddp_lab.records import Axis, Line, Series
from ddp_lab.report.charts.plot import Plot, make_plot
from ddp_lab.report.charts.style import in_our_look, new_axes, series_color, series_look, series_points
from ddp_lab.report.reading.claims import Claim
from ddp_lab.report.values import Column, Table, figure, finite, slug, text

_FEW = 12
"""A line with at most so many points shows the interval of each point; a longer line shows a band."""


def claim_plots(claim: Claim) -> list[Plot]:
    """Return a plot for each series of the claim that can be drawn."""
    found = (_claim_plot(claim, series, index) for index, series in enumerate(claim.series))
    return [plot for plot in found if plot is not None]


class _Point(NamedTuple):
    x: float
    y: float
    low: float | None
    high: float | None


@in_our_look
def _claim_plot(claim: Claim, series: Series, index: int) -> Plot | None:
    """Draw one series; words on the x axis stand side by side, and lines join them only if all are written numbers."""
    words = any(isinstance(value, str) for value in series.x.values)
    categories = [str(value) for value in series.x.values] if words else []
    places = range(len(categories)) if words else [finite(value) for value in series.x.values]
    lines = [(line.name, number, _points(places, line)) for number, line in enumerate(series.lines, 1)]
    drawn = [line for line in lines if line[2]]
    if not drawn:
        return None
    joined = all(_is_number(word) for word in categories)
    axes = new_axes()
    for order, line in enumerate(drawn):
        # Points that no line joins are moved apart, because at the same place their intervals would hide each other.
        shift = 0.0 if joined else 0.12 * (order - (len(drawn) - 1) / 2)
        _draw_line(axes, *line, shift, joined, wide=max(1.5, 4.2 - 0.9 * order))
    if words:
        axes.set_xticks(range(len(categories)), [textwrap.fill(word, 16) for word in categories])
        axes.set_xlim(-0.5, len(categories) - 0.5)
    elif ticks := _ticks([point.x for _, _, points in drawn for point in points]):
        axes.set_xticks(ticks)
    if series.y.zero:
        axes.set_ylim(bottom=min(0.0, axes.dataLim.y0))
    axes.set_xlabel(_label(series.x))
    axes.set_title(_label(series.y))
    table = _table(series, lines, categories)
    return make_plot(f"claim-{slug(claim.id)}-{index + 1}", series.title or claim.title, "", axes, table)


def _points(places: Sequence[float | None], line: Line) -> list[_Point]:
    """The points that have both a place and a value; columns of different lengths end with the shortest."""

    def at(column: Sequence[float | None] | None, place: int) -> float | None:
        return finite(column[place]) if column is not None and place < len(column) else None

    found = []
    for place, x in enumerate(places):
        y = at(line.values, place)
        if x is not None and y is not None:
            found.append(_Point(x, y, at(line.low, place), at(line.high, place)))
    return found


def _draw_line(
    axes: Axes, name: str, number: int, points: Sequence[_Point], shift: float, joined: bool, wide: float
) -> None:
    x, y = [point.x + shift for point in points], [point.y for point in points]
    bounds = [(point.low, point.high) if None not in point else (math.nan, math.nan) for point in points]
    low, high = zip(*bounds, strict=True)
    color = series_color(number)
    if len(points) > _FEW:
        axes.plot(x, y, label=name, lw=wide, **series_look(number))
        axes.fill_between(x, low, high, color=color, alpha=0.16, lw=0)
    else:
        axes.plot(x, y, label=name, **series_points(number) | ({} if joined else {"ls": "none"}))
        axes.vlines(x, low, high, color=color, lw=1.4)


def _table(series: Series, lines: Sequence[tuple[str, int, Sequence[_Point]]], categories: Sequence[str]) -> Table:
    columns = [Column("line"), Column(_label(series.x) or "x", not categories)]
    columns += [Column(title, True) for title in (_label(series.y) or "y", "low", "high")]
    rows = [
        [
            text(name),
            text(categories[int(point.x)]) if categories else figure(point.x),
            *(figure(value) for value in (point.y, point.low, point.high)),
        ]
        for name, _, points in lines
        for point in points
    ]
    return Table(columns, rows)


def _label(axis: Axis) -> str:
    unit = "times" if axis.unit == "x" else axis.unit
    return f"{axis.name} ({unit})" if unit else axis.name


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
