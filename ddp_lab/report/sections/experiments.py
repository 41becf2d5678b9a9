"""One experiment on all its layouts: the layouts in figures, their plots, and the learning curves."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_core.record.own_figures import MOST, in_words, own_figures
from ddp_lab.cluster.runs import settings_of
from ddp_lab.report.charts.layouts import layout_plots
from ddp_lab.report.charts.learning import learning_note, learning_plots
from ddp_lab.report.charts.plot import Plot
from ddp_lab.report.reading.families import Family, Group
from ddp_lab.report.reading.runs import Run
from ddp_lab.report.sections.answers import answer
from ddp_lab.report.sections.over_seeds import seeds_table
from ddp_lab.report.values import TIMES, Cell, Column, Spread, Table, figure, measured, measured_range


@dataclass(frozen=True)
class FamilySection:
    """One experiment on all its layouts."""

    family: Family
    answer: str
    """What its runs say, in one sentence."""
    table: Table
    layouts: list[Plot]
    learning: list[Plot]
    learning_note: str
    busy_note: str
    """Which runs were timed while other programs kept the machine busy."""
    over_seeds: Table | None
    """Its figures over the seeds; None without two of them."""
    next_command: str
    """The command that adds another layout, for an experiment that was run in one way only; else empty."""


_STEP_MEMORY = Column("in steps (MB)", True, "of that, before anything was evaluated or saved")


def family_section(family: Family, style: Mapping[str, int]) -> FamilySection:
    """Return the section of one experiment; `style` has the number of each layout's colour and dash."""
    return FamilySection(
        family,
        answer(family),
        comparison_table(family),
        layout_plots(family, style),
        learning_plots(family, style),
        learning_note(family),
        busy_note(family),
        seeds_table(family),
        "" if family.compared else _other_layout(family.runs[-1]),
    )


def busy_note(family: Family) -> str:
    """Return a sentence about the completed runs whose speed other programs have disturbed; nothing without such."""
    disturbed = {group.label: [run for run in group.completed if run.disturbance] for group in family.groups}
    told = [f"{label} ({runs[-1].disturbance})" for label, runs in disturbed.items() if runs]
    if not told:
        return ""
    return f"The machine was busy while these were timed, so their speeds may be too low: {'; '.join(told)}."


def _other_layout(run: Run) -> str:
    """The command that trains the same on another layout."""
    try:
        words = shlex.split(run.record["command"] or "")
    except ValueError:  # a quotation that does not end: not written by `ddp train`
        words = []
    experiment = words[2] if len(words) > 2 and words[:2] == ["ddp", "train"] else run.experiment
    layout = ["ddp", "--nproc-per-node", "2"] if run.layout.kind == "single" else ["single"]
    settings = settings_of(words, ["--set", "--reduction"])
    return shlex.join(["ddp", "train", experiment, *settings, "--layout", *layout])


def comparison_table(family: Family) -> Table:
    """Return the layouts in figures, one row per group of runs."""
    gpu, in_steps = (
        any(group.spread(name) for group in family.groups) for name in ("gpu_utilisation", "step_memory_bytes")
    )
    own = own_figures(run.record["result"] for group in family.groups for run in group.completed)[:MOST]
    columns = [
        Column("layout"),
        Column("N", True, "processes of ddp, replicas of dp"),
        Column("runs", True, "completed of all"),
        Column("samples/s", True),
        Column("speed-up", True, "against single on the same device type"),
        Column("efficiency", True),
        Column("seconds", True),
        *(Column(in_words(name), True, "over the samples that were held out") for name in own),
        Column("loss", True, "test loss, or training loss where nothing was held out"),
        Column("memory (MB)", True, "of the process or device that needed most"),
        *([_STEP_MEMORY] if in_steps else []),
        Column("cores", True, "kept busy by each process"),
        *([Column("GPU busy", True, "share of the time in which kernels ran")] if gpu else []),
        Column("data wait", True),
    ]
    return Table(columns, [_comparison_row(family, group, own, gpu, in_steps) for group in family.groups])


def _comparison_row(family: Family, group: Group, own: Sequence[str], gpu: bool, in_steps: bool) -> list[Cell]:
    gain = family.speed_up(group)
    efficiency = gain.over(group.shares) if gain else None
    loss = group.spread("test_loss") or group.spread("train_loss")
    done, total = len(group.completed), len(group.runs)
    return [
        Cell(group.label, note="over CPU threads" if group.runs[0].layout.description.endswith(")") else ""),
        figure(group.shares, str(group.shares)),
        figure(done, str(done) if done == total else f"{done} of {total}", "" if done == total else "warn"),
        _spread_cell(group.spread("samples_per_second")),
        _spread_cell(gain, suffix=TIMES),
        _spread_cell(efficiency, 100, " %"),
        _spread_cell(group.spread("seconds")),
        *(own_cell(name, group.spread(name)) for name in own),
        _spread_cell(loss, alone=4),
        _spread_cell(group.spread("peak_memory_bytes"), 1e-6, alone=3),
        *([_spread_cell(group.spread("step_memory_bytes"), 1e-6, alone=3)] if in_steps else []),
        _spread_cell(group.spread("cpu_utilisation")),
        *([_spread_cell(group.spread("gpu_utilisation"), 100, " %")] if gpu else []),
        _spread_cell(group.spread("data_wait"), 100, " %"),
    ]


def own_cell(name: str, spread: Spread | None) -> Cell:
    """Return the cell of a figure of the held-out samples, which has no noise but that of other seeds."""
    scale, suffix = (100, " %") if name == "test_accuracy" else (1, "")
    return _spread_cell(spread, scale, suffix, alone=4)


def _spread_cell(spread: Spread | None, scale: float = 1.0, suffix: str = "", alone: int = 2) -> Cell:
    if spread is None:
        return figure(None)
    note = measured_range(spread, scale) if spread.high > spread.low else ""
    return Cell(f"{measured(spread, scale, alone)}{suffix}", spread.median * scale, note=note)
