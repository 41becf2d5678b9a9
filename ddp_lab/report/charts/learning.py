"""Learning curves of an experiment: over steps and over time, all layouts overlaid, with the spread over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_lab.report.charts.plots import Plot, PlotSet, make_plot
from ddp_lab.report.charts.shapes import Axis, Line, LineChart
from ddp_lab.report.reading.families import Family, Group
from ddp_lab.report.reading.runs import Curve, Run
from ddp_lab.report.values import Column, Table, figure, number, slug, text

_MOST_POINTS = 150
_WIDE = 100
"""From this ratio of the highest to the lowest loss on, the axis is logarithmic: near zero nothing could be told."""
_TITLES = {"train_loss": "Training loss", "test_loss": "Test loss", "test_accuracy": "Test accuracy"}


def learning_plots(family: Family, style: Mapping[str, int]) -> PlotSet:
    """Each quantity over steps and over time, all groups overlaid; the band is the spread over seeds."""
    drawable = (name for run in family.runs for name, curve in run.curves.items() if len(curve.steps) > 1)
    quantities = sorted(
        dict.fromkeys(drawable), key=lambda name: (list(_TITLES).index(name) if name in _TITLES else len(_TITLES), name)
    )
    plots = []
    for quantity in quantities:
        lines = [line for group in family.groups for line in _group_lines(family, group, quantity, style)]
        plots += [_learningmake_plot(family, quantity, lines, by_time) for by_time in (False, True)]
    return PlotSet(plots, _learning_note(family))


def _rank(quantity: str) -> tuple[int, str]:
    """The usual ones first."""
    return list(_TITLES).index(quantity) if quantity in _TITLES else len(_TITLES), quantity


def _learning_note(family: Family) -> str:
    seeds = sorted({run.seed for run in family.runs if run.completed and run.seed is not None})
    parts = []
    if len(seeds) > 1:
        shown = ", ".join(map(str, seeds[:8])) + (" …" if len(seeds) > 8 else "")
        parts.append(
            f"Lines are seed {family.common_seed}; bands reach from the lowest to the highest of seeds {shown}."
        )
    if any(item.tone == "good" for item in family.verdicts):
        parts.append(
            "Over steps the layouts with exact reduction coincide to the bit, so their lines lie on one another, "
            "drawn from wide to narrow; over time they part."
        )
    if any(run.status != "completed" and run.curves for run in family.runs):
        parts.append("A thin line that ends in a cross is a run that did not finish.")
    parts.append(
        "Time is wall time since the first step, evaluations and saves included, pauses before a resume left out."
    )
    return " ".join(parts)


@dataclass(frozen=True)
class _Band:
    """A group's curve with its spread, by step; `seconds` is when the group got there."""

    label: str
    style: int
    steps: Sequence[float]
    seconds: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] | None
    high: Sequence[float] | None
    unfinished: bool


def _group_lines(family: Family, group: Group, quantity: str, style: Mapping[str, int]) -> list[_Band]:
    color = style.get(group.label, 0)
    found = []
    completed = [(run, run.curves[quantity]) for run in group.completed if quantity in run.curves]
    if completed:
        found.append(_band(group.label, color, completed, family.common_seed))
    for run in group.unfinished:
        curve = run.curves.get(quantity)
        if curve is not None and len(curve.steps) > 1:
            thin = _thinned(curve)
            name = f"{group.label} · {run.status}"
            found.append(_Band(name, color, thin.steps, thin.seconds, thin.values, None, None, True))
    return found


def _band(label: str, style: int, members: Sequence[tuple[Run, Curve]], seed: int | None) -> _Band:
    curves = [_thinned(curve) for _, curve in members]
    chosen = next((curve for (run, _), curve in zip(members, curves, strict=True) if run.seed == seed), curves[0])
    by_step = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
    times = [dict(zip(curve.steps, curve.seconds, strict=True)) for curve in curves]
    common = [step for step in chosen.steps if all(step in values for values in by_step)]
    if len(curves) == 1 or not common:
        return _Band(label, style, chosen.steps, chosen.seconds, chosen.values, None, None, False)
    own = dict(zip(chosen.steps, chosen.values, strict=True))
    return _Band(
        label,
        style,
        common,
        [statistics.median(time[step] for time in times) for step in common],
        [own[step] for step in common],
        [min(values[step] for values in by_step) for step in common],
        [max(values[step] for values in by_step) for step in common],
        False,
    )


def _thinned(curve: Curve) -> Curve:
    """At most some hundred points, each the mean of as many neighbours; the place is that of the last."""
    count = len(curve.steps)
    width = -(-count // _MOST_POINTS)
    if width <= 1:
        return curve
    cuts = range(0, count, width)
    return Curve(
        [curve.steps[min(cut + width, count) - 1] for cut in cuts],
        [curve.seconds[min(cut + width, count) - 1] for cut in cuts],
        [statistics.fmean(curve.values[cut : cut + width]) for cut in cuts],
    )


def _learningmake_plot(family: Family, quantity: str, bands: Sequence[_Band], by_time: bool) -> Plot:
    title = _TITLES.get(quantity, quantity.replace("_", " ").capitalize())
    share = quantity.endswith("accuracy")
    scale = 100.0 if share else 1.0
    lines = [
        Line(
            band.label,
            band.seconds if by_time else band.steps,
            [value * scale for value in band.values],
            None if band.low is None else [value * scale for value in band.low],
            None if band.high is None else [value * scale for value in band.high],
            band.style,
            band.unfinished,
        )
        for band in bands
    ]
    heights = [value for line in lines for value in line.y]
    log = quantity.endswith("loss") and min(heights) > 0 and max(heights) > _WIDE * min(heights)
    y = Axis(title.lower(), "%" if share else "", zero=quantity.endswith("loss"), log=log)
    x = Axis("time in training", "s", zero=True) if by_time else Axis("step", whole=True, zero=True)
    place = "time" if by_time else "steps"
    caption = "The axis does not begin at zero." if share else "The axis is logarithmic." if log else ""
    name = f"{family.anchor}-{slug(quantity)}-over-{place}"
    return make_plot(
        name, f"{title} over {place}", caption, LineChart(x, y, lines), _curve_table(bands, lines, x, title)
    )


def _curve_table(bands: Sequence[_Band], lines: Sequence[Line], x: Axis, title: str) -> Table:
    """Long form: one row per point, so that lines with unlike places fit one table."""
    banded = any(line.low is not None for line in lines)
    columns = [
        Column("layout"),
        Column("step", True),
        Column(x.label if x.unit else "seconds", True),
        Column(title.lower(), True),
    ]
    columns += [Column("lowest", True), Column("highest", True)] if banded else []
    rows = []
    for band, line in zip(bands, lines, strict=True):
        for index, step in enumerate(band.steps):
            row = [
                text(line.name),
                figure(step, f"{step:.0f}"),
                figure(band.seconds[index], f"{band.seconds[index]:.2f}"),
            ]
            row.append(figure(line.y[index], number(line.y[index], 4)))
            if banded:
                row += [figure(line.low[index] if line.low else None), figure(line.high[index] if line.high else None)]
            rows.append(row)
    return Table(columns, rows)
