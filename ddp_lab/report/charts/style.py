"""How every chart looks: colours, dashes, markers, and matplotlib's settings."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

WIDTH, HEIGHT = 320, 230
"""Pixels of a chart at its natural size: as wide as it is on a phone, so that its text is as large as meant."""

# The page has CSS variables of the same names. The series colours (s0 to s7) are distinct for the common kinds of
# colour blindness (after Okabe and Ito), and have a contrast of at least 3:1 to the surface.
LIGHT = {"surface": "#ffffff", "ink": "#1d2025", "muted": "#5b626d", "grid": "#e6e2d9"}
LIGHT |= {"s0": "#3d434c", "s1": "#0072b2", "s2": "#d55e00", "s3": "#00875f"}
LIGHT |= {"s4": "#b0568a", "s5": "#a87000", "s6": "#2e8bc0", "s7": "#7a2048"}
DARK = {"surface": "#1a1e23", "ink": "#e6e8eb", "muted": "#9da6b1", "grid": "#31373f"}
DARK |= {"s0": "#c9d1d9", "s1": "#56b4e9", "s2": "#ff8b3d", "s3": "#2cc99b"}
DARK |= {"s4": "#e79ac6", "s5": "#f0c04a", "s6": "#9ad0f5", "s7": "#e0708f"}

INK, MUTED, SURFACE = LIGHT["ink"], LIGHT["muted"], LIGHT["surface"]

DASHES: tuple[Any, ...] = (
    "solid",
    (0, (5, 2)),
    (0, (2, 1.5)),
    (0, (7, 2, 1.5, 2)),
    (0, (1, 1.5)),
    (0, (4, 1, 1, 1, 1, 1)),
)
MARKERS = ("s", "o", "^", "D", "v", "P")
"""Dashes of lines and shapes of points, for readers who cannot tell the colours apart."""

LOOK: dict[Any, Any] = {
    "figure.constrained_layout.use": True,
    "figure.facecolor": LIGHT["surface"],
    "axes.facecolor": "none",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": LIGHT["grid"],
    # The title says what the y axis shows: above the axis its text is level.
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "axes.titlecolor": MUTED,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "text.color": INK,
    # A dollar sign in a name that a user gave does not begin a formula.
    "text.parse_math": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    # Text stays text in an SVG, so that it can be searched and takes the page's font.
    "svg.fonttype": "none",
}

in_our_look = mpl.rc_context(LOOK)
"""A decorator for functions that draw or save a chart: matplotlib reads its settings when it does either."""


def new_axes(height: float = HEIGHT) -> Axes:
    """Return the empty axes of a new chart, `height` pixels high without its legend."""
    axes = Figure(figsize=(WIDTH / 72, height / 72)).add_subplot()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(lambda value, _: tick_label(value))
    return axes


def make_logarithmic(axes: Axes) -> None:
    """Make the y axis logarithmic; its labels stay those of every axis, since matplotlib's own are formulas."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: tick_label(value))
    axes.yaxis.set_minor_formatter(NullFormatter())


def tick_label(value: float) -> str:
    """Return the value as it stands at an axis: with commas, and millions shortened, so that neighbours stay apart."""
    return f"{value / 1e6:,.4g}M" if abs(value) >= 1e6 else f"{value:,.10g}"


def row_axes(names: Sequence[str], label: str) -> Axes:
    """Return axes with a row for each name, the first on top, and values to the right: names of any length have room.

    The chart is as high as its rows need, so all rows are equally high.
    """
    axes = new_axes(max(130, 80 + 28 * len(names)))
    axes.set_yticks(range(len(names)), [_in_two_lines(name) for name in names])
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.locator_params("x", nbins=3)  # the names take up to a half of the width
    axes.grid(visible=False, axis="y")
    axes.spines.bottom.set_visible(False)
    axes.set_title(label)
    return axes


def _in_two_lines(name: str) -> str:
    """The name in one line or, where it is long, in two: a row has no room for more."""
    return textwrap.fill(name, max(16, len(name) // 2 + 4), break_long_words=False)


def series_color(number: int) -> str:
    """Return the colour of a series; after the eighth they repeat."""
    return LIGHT[f"s{number % 8}"]


def series_look(number: int) -> dict[str, Any]:
    """Return the colour and the dash of a series' line, as keywords of `Axes.plot`."""
    return {"color": series_color(number), "ls": DASHES[number % len(DASHES)]}


def series_points(number: int) -> dict[str, Any]:
    """Return the look of a line whose points are marked, as keywords of `Axes.plot`."""
    return series_look(number) | {"lw": 2, "marker": MARKERS[number % len(MARKERS)], "ms": 5.5}
