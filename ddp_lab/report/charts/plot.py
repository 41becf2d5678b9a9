"""A plot is a chart with its words and the numbers behind it; here it becomes SVG."""

from __future__ import annotations

import io
import re
import textwrap
from dataclasses import dataclass
from functools import cached_property
from html import escape

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from ddp_lab.report.charts.style import LIGHT, in_our_look
from ddp_lab.report.values import Table


@dataclass(frozen=True)
class Plot:
    """A chart, the words beside it, and the numbers behind it; `name` is unique in a report."""

    name: str
    title: str
    caption: str
    figure: Figure
    table: Table

    @cached_property
    @in_our_look
    def svg(self) -> str:
        """An svg element whose colours are CSS variables (`--ink`, `--s0`, …), so that it can be light or dark."""
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        target = io.BytesIO()
        with mpl.rc_context({"svg.hashsalt": self.name}):  # the ids are made from it, and must be unique on the page
            FigureCanvasSVG(self.figure).print_svg(target, metadata=nothing)
        text = target.getvalue().decode()
        text = re.sub(r"<[^>]+>", _for_page, text[text.index("<svg") :])
        text = re.sub(r"\n\s+", "\n", text)
        described = escape(f"{self.title}. {self.caption}".strip())
        return text.replace("<svg", f'<svg class="plot" role="img" aria-label="{described}"', 1)


def _for_page(tag: re.Match[str]) -> str:
    """A tag of the svg element with variables as colours, fewer decimals, and without the ids of groups.

    Groups have the same ids in every figure, but on a page an id must be unique.
    """
    text = re.sub(r"(\.\d\d)\d+", r"\1", tag.group())
    for name, color in LIGHT.items():
        text = text.replace(color, f"var(--{name})")
    return re.sub(r'<g id="[^"]*"', "<g", text)


def make_plot(name: str, title: str, caption: str, axes: Axes, table: Table) -> Plot:
    """Return what was drawn on `axes` as a plot; a legend is added below it if there is more than one entry."""
    figure = axes.figure
    assert isinstance(figure, Figure)
    handles, labels = axes.get_legend_handles_labels()
    entries = dict(zip((textwrap.fill(label, 42) for label in labels), handles, strict=True))
    if len(entries) > 1:
        columns = 2 if max(map(len, entries)) <= 16 else 1
        lines = sum(label.count("\n") + 1 for label in entries)
        figure.set_figheight(figure.get_figheight() + 20 * -(-lines // columns) / 72)
        figure.legend(entries.values(), entries.keys(), loc="outside lower left", ncols=columns)
    return Plot(name, title, caption, figure, table)
