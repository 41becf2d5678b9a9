"""Every run by itself: what is worth a look, all that its record says, and the end of its log."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ddp_core.base.beneath import open_file
from ddp_core.config.records import dotted
from ddp_core.record.figures import in_words, own_figures
from ddp_lab.report.reading.runs import BrokenRun, Run
from ddp_lab.report.values import number, plain, slug


@dataclass(frozen=True)
class RunSection:
    """All that a run's directory tells."""

    run: Run
    anchor: str
    facts: list[tuple[str, str]]
    record: list[tuple[str, str]]
    log: str


def run_anchor(run: Run | BrokenRun) -> str:
    """Return the anchor of the run's section on the page."""
    return f"run-{slug(run.name)}"


def run_section(run: Run) -> RunSection:
    """Return the section of one run."""
    told = {
        "layout": run.layout.description,
        "end": run.early_end,
        "figures": _own_figures(run),
        "while it ran": run.disturbance or "little else ran on the machine",
        "guard": run.guard,
    }
    record = [(name, plain(value)) for name, value in dotted(run.record).items() if value is not None]
    facts = [(name, words) for name, words in told.items() if words]
    return RunSection(run, run_anchor(run), facts, record, _log_tail(run.path))


def _own_figures(run: Run) -> str:
    """All single numbers of the last evaluation."""
    found = {in_words(name): run.result(name) for name in ("test_loss", *own_figures([run.record["result"]]))}
    return ", ".join(f"{name} {number(value, 4)}" for name, value in found.items() if value is not None)


def _log_tail(path: Path) -> str:
    try:
        with open_file(path / "log.txt") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 4000))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-12:])
