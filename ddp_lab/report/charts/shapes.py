"""What plots are made of: axes, lines, bars; each chart draws itself onto matplotlib axes in a palette's colours."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from ddp_lab.report.values import number

DASHES: tuple[Any, ...] = (
    "solid",
    (0, (5, 2)),
    (0, (2, 1.5)),
    (0, (7, 2, 1.5, 2)),
    (0, (1, 1.5)),
    (0, (4, 1, 1, 1, 1, 1)),
)
CSS_DASHES = ("none", "7 3", "3 2", "9 3 2 3", "1.5 2", "6 2 2 2 2 2")
"""The same in pixels, for the keys beside a plot."""

WIDTH, HEIGHT = 390, 250


@dataclass(frozen=True)
class Palette:
    """Colours of series, text, quiet text and grid."""

    series: Sequence[str]
    text: str
    muted: str
    grid: str


@dataclass(frozen=True)
class Axis:
    """What an axis shows, its unit, and whether it begins at zero."""

    name: str
    unit: str = ""
    zero: bool = False
    whole: bool = False
    log: bool = False

    @property
    def label(self) -> str:
        """Name (unit)."""
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True)
class Line:
    """One line: colour and dash by `style`; a band from `low` to `high` where given; unfinished ones end in a cross."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    style: int = 0
    unfinished: bool = False
    points: bool = False
    joined: bool = True


@dataclass(frozen=True)
class Key:
    """One entry of a legend."""

    name: str
    style: int
    width: float = 3
    solid: bool = False


@dataclass(frozen=True)
class LineChart:
    """Lines over a common x axis; `ideal` adds y = x, `limit` a marked place on x with its words."""

    x: Axis
    y: Axis
    lines: Sequence[Line]
    ideal: str = ""
    limit: tuple[float, str] | None = None
    categories: Sequence[str] = ()
    ticks: Sequence[float] = ()

    @property
    def legend(self) -> list[Key]:
        """Names and styles, each once."""
        return list(
            dict.fromkeys(Key(line.name, line.style, 1.4 if line.unfinished else 3) for line in self.lines if line.name)
        )

    @property
    def height(self) -> int:
        """Pixels at natural size."""
        return HEIGHT

    def draw(self, axes: Axes, palette: Palette) -> None:
        """Onto matplotlib axes."""
        for order, line in enumerate(self.lines):
            color = palette.series[line.style % len(palette.series)]
            # From wide to narrow, so that lines which coincide all stay in sight.
            width = 1.4 if line.unfinished else 2.0 if line.points else max(1.5, 4.2 - 0.9 * order)
            dashes = DASHES[line.style % len(DASHES)]
            axes.plot(
                line.x,
                line.y,
                color=color,
                linewidth=width,
                linestyle=dashes if line.joined else "none",
                solid_capstyle="round",
                dash_capstyle="butt",
            )
            if line.low is not None and line.high is not None and not line.points:
                axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.16, linewidth=0)
            if line.points:
                if line.low is not None and line.high is not None:
                    axes.vlines(line.x, line.low, line.high, color=color, linewidth=1.4)
                axes.plot(line.x, line.y, linestyle="none", marker="o", markersize=5.5, color=color)
            if line.unfinished and line.x:
                axes.plot(
                    [line.x[-1]],
                    [line.y[-1]],
                    linestyle="none",
                    marker="x",
                    markersize=7,
                    markeredgewidth=2,
                    color=color,
                )
        if self.limit is not None:
            axes.axvline(self.limit[0], color=palette.muted, linewidth=1, linestyle=(0, (2, 2)))
            axes.text(
                self.limit[0],
                0.02,
                f" {self.limit[1]}",
                color=palette.muted,
                fontsize=10,
                transform=axes.get_xaxis_transform(),
            )
        if self.y.zero and not self.y.log:
            top = max((value for line in self.lines for value in (*line.y, *(line.high or ()))), default=1.0)
            axes.set_ylim(0, top * 1.06 if top > 0 else 1.0)
        if self.x.zero:
            axes.set_xlim(left=0)
        if self.ideal:
            self._draw_ideal(axes, palette)
        if self.y.log:
            axes.set_yscale("log")
        if self.x.log:
            axes.set_xscale("log")
        if self.categories:
            labels = ["\n".join(textwrap.wrap(label, 16)) for label in self.categories]
            axes.set_xticks(range(len(labels)), labels)
            axes.set_xlim(-0.5, len(labels) - 0.5)
        elif self.ticks:
            axes.set_xticks(list(self.ticks), [_tick(place) for place in self.ticks])
        elif self.x.whole:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        else:
            _plain_ticks(axes.xaxis, self.x.log)
        _plain_ticks(axes.yaxis, self.y.log)
        axes.set_xlabel(self.x.label)
        axes.set_title(self.y.label, loc="left", fontsize=10.5, color=palette.muted, pad=8)
        axes.grid(True, color=palette.grid, linewidth=0.8)

    def _draw_ideal(self, axes: Axes, palette: Palette) -> None:
        top = max([1.0, *(value for line in self.lines for value in line.x)]) * 1.06
        axes.plot([0, top], [0, top], color=palette.muted, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.text(top, top, self.ideal + " ", color=palette.muted, fontsize=10, ha="right", va="bottom")
        axes.set_xlim(0, top)
        axes.set_ylim(0, max(top * 1.1, axes.get_ylim()[1]))


@dataclass(frozen=True)
class Bar:
    """One bar: its parts from left to right, the range of the whole, and what is written at its end."""

    name: str
    parts: Sequence[float]
    low: float | None = None
    high: float | None = None
    style: int = 0
    note: str = ""


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars from zero; with `parts` (name and style) they are stacked and coloured by part, else by bar."""

    x: Axis
    bars: Sequence[Bar]
    parts: Sequence[tuple[str, int]] = ()
    mark: tuple[float, str] | None = None

    @property
    def legend(self) -> list[Key]:
        """The parts, if there are any."""
        return [Key(part, style, 8, solid=True) for part, style in self.parts]

    @property
    def height(self) -> int:
        """Pixels at natural size: bars keep their thickness."""
        return max(130, 80 + 28 * len(self.bars))

    def draw(self, axes: Axes, palette: Palette) -> None:
        """Onto matplotlib axes."""
        reach = max([0.0, *(max(sum(bar.parts), bar.high or 0.0) for bar in self.bars)])
        if self.mark is not None:
            reach = max(reach, self.mark[0])
        for place, bar in enumerate(self.bars):
            left = 0.0
            for index, part in enumerate(bar.parts):
                style = self.parts[index][1] if self.parts else bar.style
                axes.barh(
                    place, part, left=left, height=0.62, color=palette.series[style % len(palette.series)], linewidth=0
                )
                left += part
            if bar.low is not None and bar.high is not None and bar.high > bar.low:
                axes.plot(
                    [bar.low, bar.high], [place, place], color=palette.text, linewidth=1.4, marker="|", markersize=7
                )
            axes.text(
                max(left, bar.high or 0.0) + reach * 0.015,
                place,
                bar.note or number(left),
                va="center",
                fontsize=10.5,
                color=palette.text,
            )
        if self.mark is not None:
            axes.axvline(self.mark[0], color=palette.muted, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_yticks(range(len(self.bars)), [bar.name for bar in self.bars])
        axes.set_ylim(len(self.bars) - 0.45, -0.55)
        axes.set_xlim(0, (reach or 1.0) * 1.2)
        axes.set_title(self.x.label, loc="left", fontsize=10.5, color=palette.muted, pad=8)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        _plain_ticks(axes.xaxis, False)
        axes.grid(True, axis="x", color=palette.grid, linewidth=0.8)
        axes.tick_params(axis="y", length=0, labelcolor=palette.text, labelsize=10.5)


Chart = LineChart | BarChart


def _plain_ticks(axis: Any, log: bool) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    if log:
        axis.set_minor_formatter(NullFormatter())


def _tick(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.10g}" if abs(value) >= 1000 else f"{value:.6g}"
