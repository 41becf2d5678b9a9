"""A plot of the report: a chart drawn, its words, and the numbers behind it."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_lab.report.charts.drawing import Drawing, draw
from ddp_lab.report.charts.shapes import Chart, Key
from ddp_lab.report.values import Table


@dataclass(frozen=True)
class Plot:
    """A chart drawn, with its words and the numbers behind it."""

    name: str
    title: str
    caption: str
    legend: list[Key]
    drawing: Drawing
    table: Table


@dataclass(frozen=True)
class PlotSet:
    """Plots that share a heading and, mostly, a legend."""

    plots: list[Plot]
    note: str = ""

    @property
    def legend(self) -> list[Key]:
        """All entries, each once."""
        return list(dict.fromkeys(entry for plot in self.plots for entry in plot.legend))


def make_plot(name: str, title: str, caption: str, chart: Chart, table: Table) -> Plot:
    """A chart drawn and described."""
    return Plot(name, title, caption, chart.legend, draw(chart, name, f"{title}. {caption}"), table)
