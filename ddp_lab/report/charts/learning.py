"""Learning curves of an experiment: all layouts overlaid, with the spread over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from ddp_lab.report.charts.plot import Plot, make_plot
from ddp_lab.report.charts.style import in_our_look, make_logarithmic, new_axes, series_look
from ddp_lab.report.reading.families import Family, Group
from ddp_lab.report.reading.runs import Curve
from ddp_lab.report.values import Column, Table, figure, number, slug, text

_MOST_POINTS = 150
_WIDE = 100
"""Where the highest loss is more than so many times the lowest, the axis is logarithmic, to tell low losses apart."""
_TITLES = {"train_loss": "Training loss", "test_loss": "Test loss", "test_accuracy": "Test accuracy"}


def styles(families: Sequence[Family]) -> dict[str, int]:
    """Return the number of the colour and dash of each layout, by label: the same in all charts of a report.

    Number 0, close to the colour of text, is for single runs.
    """
    groups = {group.label: group for family in families for group in family.groups}
    found: dict[str, int] = {}
    following = 1
    for label in sorted(groups, key=lambda label: groups[label].layout_order):
        if label.startswith("single") and 0 not in found.values():
            found[label] = 0
        else:
            found[label] = 1 + (following - 1) % 7
            following += 1
    return found


def learning_plots(family: Family, style: Mapping[str, int]) -> list[Plot]:
    """Return a plot for each quantity that a run has measured more than once.

    `style` has the number of each layout's colour and dash.
    """
    measured = {name for run in family.runs for name, curve in run.curves.items() if len(curve.steps) > 1}
    quantities = [name for name in _TITLES if name in measured] + sorted(measured - _TITLES.keys())
    plots = []
    for quantity in quantities:
        bands = [band for group in family.groups for band in _bands(family, group, quantity, style)]
        plots.append(_learning_plot(family, quantity, bands))
    return plots


def learning_note(family: Family) -> str:
    """Return what a reader of the curves has to know, in sentences."""
    seeds = sorted({run.seed for run in family.runs if run.completed and run.seed is not None})
    parts = []
    if len(seeds) > 1:
        shown = ", ".join(map(str, seeds[:8])) + (" …" if len(seeds) > 8 else "")
        parts.append(
            f"Lines are seed {family.common_seed}; bands reach from the lowest to the highest of seeds {shown}."
        )
    if any(item.tone == "good" for item in family.verdicts):
        parts.append(
            "Layouts with exact reduction coincide to the bit, so their lines lie on one another, drawn from wide to "
            "narrow."
        )
    if any(run.status != "completed" and run.curves for run in family.runs):
        parts.append("A thin line that ends in a cross is a run that did not finish.")
    return " ".join(parts)


@dataclass(frozen=True)
class _Band:
    """The curve of one run, and the range over all runs of its group; every list has an entry for each step."""

    label: str
    style: int
    unfinished: bool
    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]

    @property
    def spread(self) -> bool:
        """Whether the runs in it differ."""
        return self.low != self.high


def _bands(family: Family, group: Group, quantity: str, style: Mapping[str, int]) -> list[_Band]:
    """All completed runs of the group in one band, and a line for each unfinished one."""
    number, scale = style.get(group.label, 0), 100.0 if quantity.endswith("accuracy") else 1.0
    done = [run for run in group.completed if quantity in run.curves]
    done.sort(key=lambda run: run.seed != family.common_seed)
    curves = [_thinned(run.curves[quantity], scale) for run in done]
    found = [_band(group.label, number, False, curves)] if curves else []
    for run in group.unfinished:
        curve = run.curves.get(quantity)
        if curve is not None and len(curve.steps) > 1:
            found.append(_band(f"{group.label} · {run.status}", number, True, [_thinned(curve, scale)]))
    return found


def _band(label: str, style: int, unfinished: bool, curves: Sequence[Curve]) -> _Band:
    """The first curve with the range over all, at the steps that all have; without such steps, the first alone."""
    points = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
    common = [step for step in curves[0].steps if all(step in curve for curve in points)]
    if not common:
        return _band(label, style, unfinished, curves[:1])
    values = [[curve[step] for curve in points] for step in common]
    first, low, high = ([pick(some) for some in values] for pick in (itemgetter(0), min, max))
    return _Band(label, style, unfinished, common, first, low, high)


def _thinned(curve: Curve, scale: float) -> Curve:
    """The curve with at most `_MOST_POINTS` points: each is the mean of its neighbours, at the step of the last."""
    count = len(curve.steps)
    width = -(-count // _MOST_POINTS)
    cuts = range(0, count, width)
    steps = [curve.steps[min(cut + width, count) - 1] for cut in cuts]
    return Curve(steps, [scale * statistics.fmean(curve.values[cut : cut + width]) for cut in cuts])


@in_our_look
def _learning_plot(family: Family, quantity: str, bands: Sequence[_Band]) -> Plot:
    title = _TITLES.get(quantity, quantity.replace("_", " ").capitalize())
    share, loss = quantity.endswith("accuracy"), quantity.endswith("loss")
    axes = new_axes()
    for order, band in enumerate(bands):
        look = series_look(band.style)
        if band.unfinished:
            look |= {"lw": 1.4, "marker": "x", "markevery": [-1], "ms": 7, "mew": 2}
        else:
            # From wide to narrow, so that lines which coincide all stay in sight.
            look |= {"lw": max(1.5, 4.2 - 0.9 * order)}
        axes.plot(band.steps, band.values, label=band.label, **look)
        if band.spread:
            axes.fill_between(band.steps, band.low, band.high, color=look["color"], alpha=0.16, lw=0)
    heights = [value for band in bands for value in band.values]
    logarithmic = loss and min(heights) > 0 and max(heights) > _WIDE * min(heights)
    if logarithmic:
        make_logarithmic(axes)
    elif loss:
        axes.set_ylim(bottom=min(0.0, axes.dataLim.y0))
    axes.locator_params("x", integer=True)
    axes.set_xlim(left=0)
    axes.set_xlabel("step")
    axes.set_title(title.lower() + (" (%)" if share else ""))
    caption = "The axis does not begin at zero." if share else "The axis is logarithmic." if logarithmic else ""
    name = f"{family.anchor}-{slug(quantity)}"
    return make_plot(name, title, caption, axes, _curve_table(axes.get_title("left"), bands))


def _curve_table(what: str, bands: Sequence[_Band]) -> Table:
    """One row per point and line, because the lines have their points at different steps."""
    titles = ["step", what, "lowest", "highest"]
    rows = []
    for band in bands:
        for step, value, low, high in zip(band.steps, band.values, band.low, band.high, strict=True):
            known = [figure(step, f"{step:.0f}"), figure(value, number(value, 4))]
            ends = (low, high) if band.spread else (None, None)
            rows.append([text(band.label), *known, *(figure(end, number(end, 4)) for end in ends)])
    if not any(band.spread for band in bands):
        titles, rows = titles[:2], [row[:3] for row in rows]
    return Table([Column("layout"), *(Column(title, True) for title in titles)], rows)
