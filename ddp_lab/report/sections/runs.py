"""Every run by itself: its facts, settings, attempts, digests, and the end of its log."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_core.base.beneath import open_file
from ddp_core.config.layout import Layout
from ddp_core.config.options import Options
from ddp_core.config.records import dotted
from ddp_core.record.own_figures import in_words, own_figures
from ddp_lab.report import values
from ddp_lab.report.reading.runs import BrokenRun, Run
from ddp_lab.report.values import Column, Table, exact, figure, moment, plain, slug, text


@dataclass(frozen=True)
class RunSection:
    """All that a run's directory tells."""

    run: Run
    anchor: str
    facts: list[tuple[str, str]]
    settings: list[tuple[str, str]]
    attempts: Table
    digests: list[tuple[str, str]]
    log: str


def run_anchor(run: Run | BrokenRun) -> str:
    """Return the anchor of the run's section on the page."""
    return f"run-{slug(run.name)}"


def run_section(run: Run, environments: Mapping[str, Sequence[Run]]) -> RunSection:
    """Return the section of one run."""
    record = run.record
    letter = next((letter for letter, runs in environments.items() if run in runs), values.ABSENT)
    facts = [
        ("layout", run.layout.description),
        ("reduction", record["options"]["reduction"]),
        ("launcher", record["options"]["launcher"]),
        ("started", moment(record["started_at"])),
        ("finished", moment(record["finished_at"])),
        ("exit code", plain(record["exit_code"])),
        *([("end", run.early_end)] if run.early_end else []),
        *([("figures", figures)] if (figures := _own_figures(run)) else []),
        ("environment", letter),
        ("while it ran", run.disturbance or "little else ran on the machine"),
        *([("guard", run.guard)] if run.guard else []),
        ("other options than the defaults", _changed_options(run)),
    ]
    digests = [
        ("weights", record["weights_sha256"]),
        ("optimizer", record["optimizer_sha256"]),
        ("data", record["data_sha256"]),
        ("experiment", record["experiment_sha256"]),
    ]
    return RunSection(
        run,
        run_anchor(run),
        facts,
        [(name, plain(value)) for name, value in dotted(record["experiment"]).items()],
        _attempts(run),
        [(name, plain(digest)) for name, digest in digests],
        _log_tail(run.path),
    )


def _own_figures(run: Run) -> str:
    """All single numbers of the last evaluation."""
    found = {in_words(name): run.result(name) for name in ("test_loss", *own_figures([run.record["result"]]))}
    return ", ".join(f"{name} {exact(value)}" for name, value in found.items() if value is not None)


def _changed_options(run: Run) -> str:
    defaults = Options().model_dump(mode="json")
    own = dict[str, Any](run.record["options"])
    told = ("reduction", "launcher", "output", "data_dir")
    changed = [f"{name}={plain(own[name])}" for name in own if name not in told and defaults.get(name) != own[name]]
    return ", ".join(changed) or "none"


def _attempts(run: Run) -> Table:
    columns = [Column("attempt", True), Column("started"), Column("layout"), Column("restart", True)]
    rows = []
    for number, attempt in enumerate(run.record["attempts"], 1):
        layout, restarts = attempt.get("layout"), attempt.get("restart_count")
        shown = _layout_label(layout) if isinstance(layout, dict) else values.ABSENT
        restart = figure(values.finite(restarts), plain(restarts))
        rows.append([figure(number, str(number)), text(attempt.get("started_at")), text(shown), restart])
    return Table(columns, rows)


def _layout_label(record: Mapping[str, Any]) -> str:
    try:
        return Layout.model_validate({name: record[name] for name in Layout.model_fields if name in record}).label
    except ValueError:
        return plain(dict(record))


def _log_tail(path: Path) -> str:
    try:
        with open_file(path / "log.txt") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 4000))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-12:])
