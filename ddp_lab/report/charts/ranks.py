"""How many ranks trained a run, where their number changed on the way: as a band over steps and over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddp_lab.report.charts.plot import Plot, make_plot
from ddp_lab.report.charts.style import in_our_look, new_axes, series_look
from ddp_lab.report.reading.families import Family
from ddp_lab.report.reading.runs import Curve
from ddp_lab.report.values import Column, Table, figure, text


def rank_plots(family: Family, style: Mapping[str, int]) -> list[Plot]:
    """Return two plots of the runs whose number of ranks changed, over steps and over time; none without such a run.

    `style` has the number of each layout's colour and dash.
    """
    bands = [
        (f"{group.label} \N{MIDDLE DOT} {run.path.name.rpartition('-')[2]}", style.get(group.label, 0), run.ranks)
        for group in family.groups
        for run in group.runs
        if run.ranks.steps
    ]
    return [_plot(family, bands, by_time) for by_time in (False, True)] if bands else []


@in_our_look
def _plot(family: Family, bands: Sequence[tuple[str, int, Curve]], by_time: bool) -> Plot:
    axes = new_axes()
    rows = []
    for label, number, curve in bands:
        x, look = curve.seconds if by_time else curve.steps, series_look(number)
        axes.fill_between(x, curve.values, step="post", color=look["color"], alpha=0.25, lw=0)
        axes.step(x, curve.values, where="post", label=label, lw=2, **look)
        for step, seconds, ranks in zip(curve.steps, curve.seconds, curve.values, strict=True):
            shown = (figure(step, f"{step:.0f}"), figure(seconds, f"{seconds:.2f}"), figure(ranks, f"{ranks:.0f}"))
            rows.append([text(label), *shown])
    axes.set_xlim(left=0)
    axes.set_ylim(0, max(max(curve.values) for *_, curve in bands) + 0.5)
    axes.locator_params("y", integer=True)
    axes.set_xlabel("time in training (s)" if by_time else "step")
    axes.set_title("ranks")
    place = "time" if by_time else "steps"
    titles = ("from step", "from time in training (s)", "ranks")
    table = Table([Column("run"), *(Column(title, True) for title in titles)], rows)
    caption = "How many ranks trained: each step of the band is a loss, a new rank, or a start on another layout."
    return make_plot(f"{family.anchor}-ranks-over-{place}", f"Ranks over {place}", caption, axes, table)
