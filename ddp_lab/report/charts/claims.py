"""The plots of a claim, drawn from the series in its JSON."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from ddp_lab.records import Axis, Line, Series
from ddp_lab.report.charts.plot import Plot, make_plot
from ddp_lab.report.charts.style import (
    in_our_look,
    new_axes,
    row_axes,
    series_color,
    series_look,
    series_points,
    tick_label,
)
from ddp_lab.report.reading.claims import Claim
from ddp_lab.report.values import Column, Table, figure, finite, slug, text

_FEW = 12
"""A line with at most so many points shows the interval of each point; a longer line shows a band."""
_LETTER = 0.02
"""The width of a letter below an axis, as a share of the axis."""


def claim_plots(claim: Claim) -> list[Plot]:
    """Return a plot for each series of the claim that can be drawn."""
    found = (_claim_plot(claim, series, index) for index, series in enumerate(claim.series))
    return [plot for plot in found if plot is not None]


class _Point(NamedTuple):
    x: float
    y: float
    low: float | None
    high: float | None


_Drawn = tuple[str, int, Sequence[_Point]]
"""A line's name, the number of its look, and its points."""


@in_our_look
def _claim_plot(claim: Claim, series: Series, index: int) -> Plot | None:
    """Draw one series: lines over numbers, also where these are written as words; for other words a row each."""
    words = any(isinstance(value, str) for value in series.x.values)
    categories = [str(value) for value in series.x.values] if words else []
    places = range(len(categories)) if words else [finite(value) for value in series.x.values]
    lines = [(line.name, number, _points(places, line)) for number, line in enumerate(series.lines, 1)]
    drawn = [line for line in lines if line[2]]
    if not drawn:
        return None
    if all(_is_number(word) for word in categories):
        axes = _over_numbers(drawn, series, categories)
    else:
        axes = _in_rows(drawn, series, categories)
    table = _table(series, lines, categories)
    return make_plot(f"claim-{slug(claim.id)}-{index + 1}", series.title or claim.title, "", axes, table)


def _over_numbers(drawn: Sequence[_Drawn], series: Series, written: Sequence[str]) -> Axes:
    """Lines over numbers; where `written` names the values, these stand at equal distances, labelled so."""
    axes = new_axes()
    for order, line in enumerate(drawn):
        _draw_line(axes, *line, wide=max(1.5, 4.2 - 0.9 * order))
    if written:
        axes.set_xticks(range(len(written)), written)
        axes.set_xlim(-0.5, len(written) - 0.5)
    elif ticks := _ticks([point.x for _, _, points in drawn for point in points]):
        axes.set_xticks(ticks)
    if series.y.zero:
        axes.set_ylim(bottom=min(0.0, axes.dataLim.y0))
    axes.set_xlabel(_label(series.x))
    axes.set_title(_label(series.y))
    return axes


def _in_rows(drawn: Sequence[_Drawn], series: Series, categories: Sequence[str]) -> Axes:
    """A row for each category, because level words below one another never overlap; the values go to the right."""
    axes = row_axes(categories, _label(series.y) + (f", by {series.x.name}" if series.x.name else ""))
    for order, (name, number, points) in enumerate(drawn):
        # Lines are moved apart, because in the same row their intervals would hide each other.
        shift = 0.18 * (order - (len(drawn) - 1) / 2)
        rows = [point.x + shift for point in points]
        low, high = _bounds(points)
        axes.plot([point.y for point in points], rows, label=name, **series_points(number) | {"ls": "none"})
        axes.hlines(rows, low, high, color=series_color(number), lw=1.4)
    if series.y.zero:
        axes.set_xlim(left=min(0.0, axes.dataLim.x0))
    return axes


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


def _bounds(points: Sequence[_Point]) -> tuple[list[float], list[float]]:
    """The ends of the points' intervals; NaN, which is not drawn, for a point without one."""
    known = [(point.low, point.high) if None not in point else (math.nan, math.nan) for point in points]
    return [low for low, _ in known if low is not None], [high for _, high in known if high is not None]


def _draw_line(axes: Axes, name: str, number: int, points: Sequence[_Point], wide: float) -> None:
    x, y = [point.x for point in points], [point.y for point in points]
    low, high = _bounds(points)
    color = series_color(number)
    if len(points) > _FEW:
        axes.plot(x, y, label=name, lw=wide, **series_look(number))
        axes.fill_between(x, low, high, color=color, alpha=0.16, lw=0)
    else:
        axes.plot(x, y, label=name, **series_points(number))
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
    """The places themselves, where they are few and so far apart that what is written there has room."""
    found = sorted(set(places))
    if not 1 < len(found) <= 8:
        return []
    gaps = [after - before for before, after in itertools.pairwise(found)]
    widest = max(len(tick_label(place)) for place in found)
    return found if min(gaps) >= max(0.07, _LETTER * (widest + 1)) * (found[-1] - found[0]) else []
