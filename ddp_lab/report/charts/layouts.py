"""What each layout of an experiment costs and gains: throughput, speed-up, efficiency, memory, the split of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddp_lab.report.charts.plots import Plot, PlotSet, make_plot
from ddp_lab.report.charts.shapes import Axis, Bar, BarChart, Line, LineChart
from ddp_lab.report.reading.families import Family, Group
from ddp_lab.report.reading.runs import STEP_PARTS
from ddp_lab.report.values import Column, Spread, Table, figure, plural, text

_PARTS = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "exposed_communication": "exposed communication",
    "optimizer": "optimizer",
    "checkpoint": "checkpoint",
    "forward_backward": "forward and backward",
    "other": "other",
}


def styles(families: Sequence[Family]) -> dict[str, int]:
    """The same colour for the same way of running, in the whole report; single runs take the ink."""
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


def layout_plots(family: Family, style: Mapping[str, int]) -> PlotSet:
    """Throughput, speed-up, efficiency, memory and the split of the step; only what there are figures for."""
    groups = [group for group in family.groups if group.completed]
    name = family.anchor
    plots = []
    if any(group.spread("samples_per_second") for group in groups):
        plots.append(_throughput(name, groups, style))
    if len(groups) > 1 and sum(1 for group in groups if family.speed_up(group)) > 1:
        plots += [_speed_up(name, family, groups), _efficiency(name, family, groups, style)]
    if any(group.spread("peak_memory_bytes") for group in groups):
        plots.append(_memory(name, groups, style))
    if any(group.spread("cpu_utilisation") for group in groups):
        plots.append(_cores(name, groups, style))
    split = _time_split(name, groups)
    return PlotSet([*plots, split] if split else plots)


def _bars(
    groups: Sequence[Group], values: Sequence[Spread | None], style: Mapping[str, int], scale: float = 1.0
) -> list[Bar]:
    return [
        Bar(group.label, [value.median * scale], value.low * scale, value.high * scale, style.get(group.label, 0))
        for group, value in zip(groups, values, strict=True)
        if value is not None
    ]


def _spread_table(groups: Sequence[Group], values: Sequence[Spread | None], what: str, scale: float = 1.0) -> Table:
    columns = [
        Column("layout"),
        Column(what, True),
        Column("lowest", True),
        Column("highest", True),
        Column("runs", True),
    ]
    rows = [
        [
            text(group.label),
            *(figure(part * scale) for part in (value.median, value.low, value.high)),
            figure(value.count, str(value.count)),
        ]
        for group, value in zip(groups, values, strict=True)
        if value is not None
    ]
    return Table(columns, rows)


def _repeats(values: Sequence[Spread | None]) -> str:
    counts = [value.count for value in values if value]
    if not counts or max(counts) == 1:
        return "One run each, so no spread is known."
    return "Bars show the median; the line across runs from the lowest to the highest run."


def _throughput(name: str, groups: Sequence[Group], style: Mapping[str, int]) -> Plot:
    values = [group.spread("samples_per_second") for group in groups]
    chart = BarChart(Axis("samples per second", zero=True), _bars(groups, values, style))
    return make_plot(
        f"{name}-throughput",
        "Throughput",
        f"More is better. {_repeats(values)}",
        chart,
        _spread_table(groups, values, "samples/s"),
    )


def _speed_up(name: str, family: Family, groups: Sequence[Group]) -> Plot:
    by_kind: dict[str, list[tuple[float, Spread]]] = {}
    for group in groups:
        gain = family.speed_up(group)
        if gain is not None:
            run = group.runs[0]
            line = "single" if run.layout.kind == "single" else f"{run.layout.kind}, {run.record.options.reduction}"
            by_kind.setdefault(line, []).append((float(group.shares), gain))
    lines = []
    for index, (kind, points) in enumerate(by_kind.items()):
        points.sort(key=lambda point: point[0])
        x, gains = [point[0] for point in points], [point[1] for point in points]
        lines.append(
            Line(
                kind,
                x,
                [gain.median for gain in gains],
                [gain.low for gain in gains],
                [gain.high for gain in gains],
                index,
                points=True,
            )
        )
    cores = _core_count(groups)
    most = max(group.shares for group in groups)
    limit = (float(cores), plural(cores, "core")) if cores is not None and cores < most else None
    caption = "Throughput over that of one process; the broken line is the ideal, N times as fast on N."
    if limit:
        caption += f" The machine has {plural(cores or 0, 'core')}: beyond that no gain can be expected."
    chart = LineChart(
        Axis("processes or replicas", zero=True, whole=True),
        Axis("speed-up", "times", zero=True),
        lines,
        ideal="ideal",
        limit=limit,
    )
    values = [family.speed_up(group) for group in groups]
    return make_plot(f"{name}-speed-up", "Speed-up", caption, chart, _spread_table(groups, values, "speed-up"))


def _core_count(groups: Sequence[Group]) -> int | None:
    """Cores of the machine, where all the runs used the CPU of one kind of machine."""
    found = {group.runs[0].record.environment.get("cores") for group in groups}
    on_cpu = all(group.runs[0].layout.device == "cpu" for group in groups)
    cores = found.pop() if on_cpu and len(found) == 1 else None
    return cores if isinstance(cores, int) else None


def _efficiency(name: str, family: Family, groups: Sequence[Group], style: Mapping[str, int]) -> Plot:
    groups = [group for group in groups if group.shares > 1]
    gains = [family.speed_up(group) for group in groups]
    values = [gain.over(group.shares) if gain else None for group, gain in zip(groups, gains, strict=True)]
    chart = BarChart(
        Axis("speed-up per process or replica", "%", zero=True), _bars(groups, values, style, 100), mark=(100, "ideal")
    )
    caption = "Speed-up divided by N; the broken line is 100 %, where no process waits for another."
    return make_plot(
        f"{name}-efficiency", "Efficiency", caption, chart, _spread_table(groups, values, "efficiency (%)", 100)
    )


def _memory(name: str, groups: Sequence[Group], style: Mapping[str, int]) -> Plot:
    values = [group.spread("peak_memory_bytes") for group in groups]
    chart = BarChart(Axis("peak memory", "MB", zero=True), _bars(groups, values, style, 1e-6))
    devices = {group.runs[0].layout.device for group in groups}
    what = "the process's peak resident size, with its part of the libraries in it"
    if devices == {"cuda"}:
        what = "the device's peak allocation"
    elif len(devices) > 1:
        what = "the peak allocation on CUDA, the peak resident size on CPU"
    caption = f"Of the process or device that needed most: {what}."
    return make_plot(f"{name}-memory", "Memory", caption, chart, _spread_table(groups, values, "MB", 1e-6))


def _cores(name: str, groups: Sequence[Group], style: Mapping[str, int]) -> Plot:
    values = [group.spread("cpu_utilisation") for group in groups]
    bars = _bars(groups, values, style)
    caption = (
        "Processor time over wall time of the training, mean over the processes. Below 1 they waited for each other, "
        "for data or for a free core; DP over CPU threads is one process and may use several."
    )
    return make_plot(
        f"{name}-cores",
        "Processor use",
        caption,
        BarChart(Axis("cores kept busy by each process", zero=True), bars, mark=(1, "1 core")),
        _spread_table(groups, values, "cores per process"),
    )


def _time_split(name: str, groups: Sequence[Group]) -> Plot | None:
    splits = {group.label: split for group in groups if (split := group.time_split())}
    if not splits:
        return None
    found = {part for split in splits.values() for part in split}
    parts = [part for part in (*STEP_PARTS, "computing and communication") if part in found]
    keys = [(_PARTS.get(part, part), 1 + STEP_PARTS.index(part) if part in STEP_PARTS else 7) for part in parts]
    bars = [Bar(label, [split.get(part, 0.0) * 1e3 for part in parts]) for label, split in splits.items()]
    chart = BarChart(Axis("time per step", "ms", zero=True), bars, parts=keys)
    rows = [
        [text(label), *(figure(split[part] * 1e3 if part in split else None) for part in parts)]
        for label, split in splits.items()
    ]
    caption = "Mean over the steps; less is better."
    if found == {"data", "computing and communication"}:
        caption += " These runs tell the wait for data from the rest only."
    table = Table([Column("layout"), *(Column(f"{name} (ms)", True) for name, _ in keys)], rows)
    return make_plot(f"{name}-time-split", "Where a step's time goes", caption, chart, table)
