"""One experiment on all its layouts: the layouts in figures, and the learning curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_core.record.figures import MOST, in_words, over_seeds, own_figures
from ddp_lab.report.charts.learning import learning_note, learning_plots
from ddp_lab.report.charts.plot import Plot
from ddp_lab.report.reading.families import Family, Group
from ddp_lab.report.values import TIMES, Cell, Column, Spread, Table, figure, number, spread_range


@dataclass(frozen=True)
class FamilySection:
    """One experiment on all its layouts."""

    family: Family
    table: Table
    learning: list[Plot]
    learning_note: str
    over_seeds: Table | None
    """Its figures over the seeds; None without two of them."""


_STEP_MEMORY = Column("in steps (MB)", True, "of that, before anything was evaluated or saved")


def family_section(family: Family, style: Mapping[str, int]) -> FamilySection:
    """Return the section of one experiment; `style` has the number of each layout's colour and dash."""
    return FamilySection(
        family,
        comparison_table(family),
        learning_plots(family, style),
        learning_note(family),
        seeds_table(family),
    )


def seeds_table(family: Family) -> Table | None:
    """Return a row for each figure with its mean over the seeds; None without two seeds."""
    found = over_seeds(run.record for run in family.runs)
    if found is None:
        return None
    columns = [
        Column("over seeds"),
        Column("mean ± standard deviation (n)", True, f"of the seeds {', '.join(map(str, found.seeds))}{found.others}"),
    ]
    rows = [[Cell(each.name.replace("_", " ")), figure(each.mean, each.words)] for each in found.figures]
    return Table(columns, rows)


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
        _spread_cell(loss, digits=4),
        _spread_cell(group.spread("peak_memory_bytes"), 1e-6),
        *([_spread_cell(group.spread("step_memory_bytes"), 1e-6)] if in_steps else []),
        _spread_cell(group.spread("cpu_utilisation")),
        *([_spread_cell(group.spread("gpu_utilisation"), 100, " %")] if gpu else []),
        _spread_cell(group.spread("data_wait"), 100, " %"),
    ]


def own_cell(name: str, spread: Spread | None) -> Cell:
    """Return the cell of a figure of the held-out samples."""
    scale, suffix = (100, " %") if name == "test_accuracy" else (1, "")
    return _spread_cell(spread, scale, suffix, digits=4)


def _spread_cell(spread: Spread | None, scale: float = 1.0, suffix: str = "", digits: int = 3) -> Cell:
    if spread is None:
        return figure(None)
    note = spread_range(spread, scale, digits) if spread.high > spread.low else ""
    return Cell(f"{number(spread.median * scale, digits)}{suffix}", spread.median * scale, note=note)
