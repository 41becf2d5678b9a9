"""The table of what ran where."""

from __future__ import annotations

import re
from dataclasses import replace

from ddp_core.record.figures import in_words, own_figures
from ddp_lab.report import values
from ddp_lab.report.reading.families import way_of
from ddp_lab.report.reading.runs import Inventory, Run
from ddp_lab.report.sections.experiments import own_cell
from ddp_lab.report.sections.runs import run_anchor
from ddp_lab.report.values import TONES, Cell, Column, Spread, Table, figure, moment, number, text


def runs_table(inventory: Inventory) -> Table:
    """Return a row for each run, the newest first, and one for each directory that cannot be read as a run."""
    has_own = any(own_figures([run.record["result"]]) for run in inventory.runs)
    columns = [
        Column("experiment"),
        Column("layout"),
        Column("seed", True),
        Column("status"),
        Column("weights", hint="the first letters of their digest"),
        *([Column("figure", True, "accuracy, or the first of the experiment's own figures")] if has_own else []),
        Column("loss", True),
        Column("samples/s", True),
        Column("steps", True),
        Column("seconds", True),
        Column("started (UTC)"),
    ]
    rows = [_run_row(run, has_own) for run in reversed(inventory.runs)]
    for broken in inventory.broken:
        head, _, tail = broken.name.rpartition("/")
        label = re.sub(r"-\d{8}T\d{6}Z-.*", "", tail)
        row = [text(head), text(label, link=run_anchor(broken)), figure(None), text("unreadable", "bad")]
        rows.append([*row, *[text(None)] * (len(columns) - len(row))])
    return Table(columns, rows)


def _run_row(run: Run, has_own: bool) -> list[Cell]:
    loss = run.result("test_loss")
    loss = run.result("train_loss") if loss is None else loss
    digest = (run.record["weights_sha256"] or "")[:12]
    return [
        text(run.experiment),
        text(way_of(run), link=run_anchor(run)),
        figure(run.seed, str(run.seed)),
        text(run.ended, TONES[run.status]),
        Cell(digest or values.ABSENT, digest or None, "code", note=run.broken or ""),
        *([_own(run)] if has_own else []),
        figure(loss, number(loss, 4)),
        replace(figure(run.result("samples_per_second")), note="busy machine" if run.disturbance else ""),
        figure(run.last_step, f"{run.last_step:,}" if run.last_step is not None else None),
        figure(run.result("seconds")),
        Cell(moment(run.record["started_at"])[5:], run.record["started_at"]),
    ]


def _own(run: Run) -> Cell:
    """The first figure of the held-out samples, with its name."""
    name = next(iter(own_figures([run.record["result"]])), None)
    if name is None:
        return figure(None)
    return replace(own_cell(name, Spread.of([run.result(name)])), note=in_words(name))
