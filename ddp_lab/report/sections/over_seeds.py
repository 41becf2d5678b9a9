"""The figures of an experiment over its seeds."""

from __future__ import annotations

from ddp_core.record.over_seeds import over_seeds
from ddp_lab.report.reading.families import Family
from ddp_lab.report.values import Cell, Column, Table, figure


def seeds_table(family: Family) -> Table | None:
    """Return a row for each figure: mean and standard deviation; None without two seeds."""
    found = over_seeds(run.record for run in family.runs)
    if found is None:
        return None
    columns = [
        Column("over seeds"),
        Column("mean ± standard deviation (n)", True, f"of the seeds {', '.join(map(str, found.seeds))}{found.others}"),
    ]
    rows = [[Cell(each.name.replace("_", " ")), figure(each.mean, each.words)] for each in found.figures]
    return Table(columns, rows)
