"""What each layout of an experiment costs and gains: throughput, speed-up, the split of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from ddp_lab.report.charts.plot import Plot, make_plot
from ddp_lab.report.charts.style import (
    INK,
    MUTED,
    SURFACE,
    in_our_look,
    new_axes,
    row_axes,
    series_color,
    series_points,
)
from ddp_lab.report.reading.families import Family, Group
from ddp_lab.report.reading.runs import STEP_PARTS, Run
from ddp_lab.report.values import Column, Spread, Table, figure, measured, plural, text

_PARTS = {
    "data": "waiting for data",
    "exposed_communication": "exposed communication",
    "forward_backward": "forward and backward",
}
"""The parts of a step whose names have to be put into words."""


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


@in_our_look
def layout_plots(family: Family, style: Mapping[str, int]) -> list[Plot]:
    """Return throughput, speed-up and the split of a step, where there are figures.

    `style` has the number of each layout's colour. Only completed runs count.
    """
    groups = [group for group in family.groups if group.completed]
    compared = len(groups) > 1 and sum(1 for group in groups if family.speed_up(group)) > 1
    found = [
        _throughput(family, groups, style),
        _speed_up(family, groups) if compared else None,
        _time_split(family, groups),
    ]
    return [plot for plot in found if plot is not None]


def _throughput(family: Family, groups: Sequence[Group], style: Mapping[str, int]) -> Plot | None:
    spreads = {group.label: group.spread("samples_per_second") for group in groups}
    repeated = any(spread and spread.count > 1 for spread in spreads.values())
    caption = "More is better. " + (
        "Bars show the median; the line across runs from the lowest to the highest run."
        if repeated
        else "One run each, so no spread is known."
    )
    return _bars(f"{family.anchor}-throughput", "Throughput", caption, "samples per second", spreads, style)


def _speed_up(family: Family, groups: Sequence[Group]) -> Plot:
    gains = {group.label: family.speed_up(group) for group in groups}
    lines: dict[str, list[tuple[int, Spread]]] = {}
    for group in groups:
        run, gain = group.runs[0], gains[group.label]
        if gain is not None:
            lines.setdefault(_line_of(run), []).append((group.shares, gain))
    most = max(group.shares for group in groups)
    caption = "Throughput over that of one process; the broken line is the ideal, N times as fast on N."
    axes = new_axes()
    axes.axline((0, 0), slope=1, color=MUTED, lw=1.2, ls="--", label="ideal")
    cores = _core_count(groups)
    if cores is not None and cores < most:
        axes.axvline(cores, color=MUTED, lw=1.2, ls=":", label=plural(cores, "core"))
        caption += f" The machine has {plural(cores, 'core')}: beyond that no gain can be expected."
    for index, (line, points) in enumerate(lines.items()):
        points.sort(key=lambda point: point[0])
        x = [shares for shares, _ in points]
        low, median, high = zip(*((gain.low, gain.median, gain.high) for _, gain in points), strict=True)
        axes.plot(x, median, label=line, **series_points(index))
        axes.vlines(x, low, high, color=series_color(index), lw=1.4)
    axes.set_xlim(0, 1.06 * most)
    axes.set_ylim(0, 1.06 * max(most, axes.dataLim.y1))
    axes.locator_params("x", integer=True)
    axes.set_xlabel("processes or replicas")
    axes.set_title("speed-up (times)")
    return make_plot(f"{family.anchor}-speed-up", "Speed-up", caption, axes, _spread_table("speed-up", gains))


def _line_of(run: Run) -> str:
    layout = run.layout
    if layout.kind == "single":
        return "single"
    sharded = "" if layout.shard == "none" else f", shard {layout.shard}"
    return f"{layout.kind}, {run.record['options']['reduction']}{sharded}"


def _core_count(groups: Sequence[Group]) -> int | None:
    """Cores of the machine; None unless all runs used the CPU, on machines with the same number of cores."""
    found = {group.runs[0].record["environment"].get("cores") for group in groups}
    on_cpu = all(group.runs[0].layout.device == "cpu" for group in groups)
    cores = found.pop() if on_cpu and len(found) == 1 else None
    return cores if isinstance(cores, int) else None


def _bars(
    name: str,
    title: str,
    caption: str,
    label: str,
    spreads: Mapping[str, Spread | None],
    style: Mapping[str, int],
) -> Plot | None:
    """One bar for each layout: the median, and a line from the lowest to the highest."""
    known = {layout: spread for layout, spread in spreads.items() if spread}
    if not known:
        return None
    axes = _bar_axes(list(known), label)
    for place, (layout, spread) in enumerate(known.items()):
        axes.barh(place, spread.median, height=0.62, color=series_color(style.get(layout, 0)))
        if spread.high > spread.low:
            axes.plot([spread.low, spread.high], [place, place], color=INK, lw=1.4, marker="|", ms=7)
        _write_behind(axes, place, max(spread.median, spread.high), measured(spread))
    return make_plot(name, title, caption, axes, _spread_table(label, spreads))


def _time_split(family: Family, groups: Sequence[Group]) -> Plot | None:
    """A bar for each layout, made up of the parts of a step."""
    splits = {group.label: split for group in groups if (split := group.time_split())}
    if not splits:
        return None
    found = {part for split in splits.values() for part in split}
    parts = {part: _PARTS.get(part, part) for part in STEP_PARTS if part in found}
    axes = _bar_axes(list(splits), "time per step (ms)")
    ends = [0.0] * len(splits)
    for part, words in parts.items():
        widths = [1e3 * split.get(part, 0.0) for split in splits.values()]
        color = series_color(1 + STEP_PARTS.index(part))
        axes.barh(range(len(splits)), widths, left=ends, height=0.62, color=color, label=words)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for place, end in enumerate(ends):
        _write_behind(axes, place, end, measured(Spread.of([end])))
    caption = "Mean over the steps; less is better."
    rows = [
        [text(layout), *(figure(1e3 * split[part] if part in split else None) for part in parts)]
        for layout, split in splits.items()
    ]
    table = Table([Column("layout"), *(Column(f"{words} (ms)", True) for words in parts.values())], rows)
    return make_plot(f"{family.anchor}-time-split", "Where a step's time goes", caption, axes, table)


def _bar_axes(names: Sequence[str], label: str) -> Axes:
    """Axes for horizontal bars, with room behind the longest bar for its value."""
    axes = row_axes(names, label)
    axes.margins(x=0.2)
    return axes


def _write_behind(axes: Axes, place: int, end: float, value: str) -> None:
    """Write the value behind the end of a bar, over any line that passes there."""
    ground = {"facecolor": SURFACE, "edgecolor": "none", "pad": 1.0}
    axes.annotate(value, (end, place), xytext=(5, 0), textcoords="offset points", va="center", bbox=ground)


def _spread_table(what: str, spreads: Mapping[str, Spread | None]) -> Table:
    titles = [what, "lowest", "highest", "runs"]
    rows = [
        [text(layout), *map(figure, (spread.median, spread.low, spread.high)), figure(spread.count, str(spread.count))]
        for layout, spread in spreads.items()
        if spread is not None
    ]
    return Table([Column("layout"), *(Column(title, True) for title in titles)], rows)
