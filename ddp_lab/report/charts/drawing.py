"""Charts drawn with matplotlib: as SVG whose colours the page decides, and as SVG and PNG files that stand alone.

Inside the page a plot takes its colours from CSS variables (`--s0` … for series, `currentColor` for text), so that it
follows the reader's light or dark setting. To get there it is drawn in stand-in colours, then replaced in the SVG.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from ddp_lab.report.charts.shapes import DASHES, WIDTH, Chart, Key, LineChart, Palette

# Distinct for the common kinds of colour blindness (after Okabe and Ito), with a contrast of 3:1 on paper and on black.
LIGHT = ("#3d434c", "#0072b2", "#d55e00", "#00875f", "#b0568a", "#a87000", "#2e8bc0", "#7a2048")
DARK = ("#c9d1d9", "#56b4e9", "#ff8b3d", "#2cc99b", "#e79ac6", "#f0c04a", "#9ad0f5", "#e0708f")
_INK = {"light": ("#1d2025", "#6b7280", "#dcd8cf"), "dark": ("#e6e8eb", "#9aa3ae", "#363c45")}
_STAND_INS = tuple(f"#0102{index:02x}" for index in range(len(LIGHT)))
_TEXT, _MUTED, _GRID = "#010301", "#010302", "#010303"

_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue','Noto Sans','DejaVu Sans',sans-serif"


_LEGEND = "the-legend"

Place = tuple[float, float, float, float]
"""Left, bottom, width and height of the axes, as shares of the figure."""

_FOR_PAGE = Palette(_STAND_INS, _TEXT, _MUTED, _GRID)
_FOR_PAPER = Palette(LIGHT, *_INK["light"])


@dataclass(frozen=True)
class Drawing:
    """A chart as markup for the page and as files."""

    inline: str
    svg: bytes = field(repr=False)
    png: bytes = field(repr=False)


def draw(chart: Chart, name: str, description: str) -> Drawing:
    """All three forms; the same chart gives the same bytes."""
    svg, place = _render(chart, _FOR_PAGE, "svg")
    png, _ = _render(chart, _FOR_PAPER, "png", place)
    return Drawing(_for_page(svg, name, description, chart.height), _stand_alone(svg), png)


def _legend_height(chart: Chart) -> int:
    """Pixels below the chart; one entry needs no legend."""
    return 18 * -(-len(chart.legend) // 2) if len(chart.legend) > 1 else 0


def _render(chart: Chart, palette: Palette, kind: str, place: Place | None = None) -> tuple[bytes, Place]:
    """The chart with its legend below, and where its axes came to lie; given that, nothing has to be fitted again."""
    height = chart.height + _legend_height(chart)
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "ddp-report",
        "font.size": 10.5,
        "font.family": "DejaVu Sans",
        "axes.edgecolor": palette.muted,
        "axes.labelcolor": palette.muted,
        "xtick.color": palette.muted,
        "ytick.color": palette.muted,
        "text.color": palette.text,
        "text.parse_math": False,
        "axes.axisbelow": True,
        "axes.formatter.useoffset": False,
    }
    with mpl.rc_context(settings):
        figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72)
        if place is None:
            figure.set_layout_engine("constrained", rect=(0, 1 - chart.height / height, 1, chart.height / height))
            axes = figure.add_subplot()
        else:
            axes = figure.add_axes(place)
        chart.draw(axes, palette)
        for side in ("top", "right") if isinstance(chart, LineChart) else ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=3, labelsize=10)
        if height > chart.height:
            _add_legend(figure, chart.legend, palette)
        target = io.BytesIO()
        if kind == "svg":
            figure.savefig(target, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        else:
            figure.savefig(target, format="png", dpi=160, facecolor="white", metadata={"Software": None})
        left, bottom, width, top = axes.get_position(original=True).bounds
        return target.getvalue(), (left, bottom, width, top)


def _add_legend(figure: Figure, shown: Sequence[Key], palette: Palette) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [],
            [],
            label=key.name,
            color=palette.series[key.style % len(palette.series)],
            linewidth=key.width * 0.8,
            linestyle="solid" if key.solid else DASHES[key.style % len(DASHES)],
        )
        for key in shown
    ]
    legend = figure.legend(
        handles=handles, loc="lower left", ncols=2, frameon=False, borderaxespad=0.3, fontsize=10, handlelength=2.6
    )
    legend.set_in_layout(False)
    legend.set_gid(_LEGEND)


def _body(text: str) -> str:
    """The svg element alone, without what only a file needs."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    referred = set(re.findall(r"#([\w.-]+)", text))
    text = re.sub(r' id="([^"]+)"', lambda found: found.group() if found.group(1) in referred else "", text)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'"[^"]*"', lambda found: re.sub(r"(\d\.\d{2})\d+", r"\1", found.group()), text)
    return re.sub(r"\n\s*", "\n", text)


def _recoloured(text: str) -> str:
    for index, color in enumerate(_STAND_INS):
        text = text.replace(color, f"var(--s{index})")
    return text.replace(_TEXT, "currentColor").replace(_MUTED, "var(--muted)").replace(_GRID, "var(--grid)")


def _for_page(svg: bytes, name: str, description: str, height: int) -> str:
    """Without the legend at the foot: the page has one of its own."""
    text = _recoloured(_body(_without_legend(svg.decode())))
    # Ids are shared by the whole page: make them this plot's own.
    text = re.sub(r'id="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{name}-\1"', text)
    head = f'<svg class="plot" role="img" aria-label="{_attribute(description)}" viewBox="0 0 {WIDTH} {height}">'
    return re.sub(r"<svg.*?>", lambda _: head, text, count=1, flags=re.DOTALL)


def _without_legend(text: str) -> str:
    start = text.find(f'<g id="{_LEGEND}">')
    if start < 0:
        return text
    depth = 0
    for tag in re.finditer(r"<g\b|</g>", text[start:]):
        depth += 1 if tag.group() == "<g" else -1
        if depth == 0:
            return text[:start] + text[start + tag.end() :]
    return text


def _stand_alone(svg: bytes) -> bytes:
    def variables(theme: str, series: Sequence[str]) -> str:
        ink, muted, grid = _INK[theme]
        back = "#fff" if theme == "light" else "#1a1e23"
        colors = ";".join(f"--s{index}:{color}" for index, color in enumerate(series))
        return f"svg{{background:{back};color:{ink};--muted:{muted};--grid:{grid};{colors}}}"

    style = (
        f"<style>svg{{font-family:{_FONT}}}{variables('light', LIGHT)}"
        f"@media (prefers-color-scheme:dark){{{variables('dark', DARK)}}}</style>"
    )
    text = _recoloured(_body(svg.decode()))
    return re.sub(r"(<svg.*?>)", lambda found: found.group(1) + style, text, count=1, flags=re.DOTALL).encode()


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
