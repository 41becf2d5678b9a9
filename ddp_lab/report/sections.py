"""What the report shows, section by section, from records to tables and plots."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_core.spec.layout import Layout
from ddp_core.spec.options import Options
from ddp_lab.report import values
from ddp_lab.report.charts.claims import claim_plots
from ddp_lab.report.charts.layouts import comparison_table, layout_plots, styles
from ddp_lab.report.charts.learning import learning_plots
from ddp_lab.report.charts.plots import Plot, PlotSet
from ddp_lab.report.reading.claims import Claim, Drill, Findings, MeasuredClaim, Picture, read_findings
from ddp_lab.report.reading.families import Family, digest_letters, find_families, flatten, way_of
from ddp_lab.report.reading.runs import BrokenRun, Inventory, Run, read_runs
from ddp_lab.report.values import TIMES, Cell, Column, Table, figure, number, plural, slug, text

TONES = {
    "completed": "good",
    "failed": "bad",
    "stopped": "warn",
    "interrupted": "warn",
    "running": "quiet",
    "unreadable": "bad",
    "confirmed": "good",
    "refuted": "bad",
    "inconclusive": "warn",
    "not measurable here": "quiet",
    "recovered": "good",
}


@dataclass(frozen=True)
class FamilySection:
    """One experiment on all its layouts."""

    family: Family
    table: Table
    layouts: PlotSet
    learning: PlotSet


@dataclass(frozen=True)
class ClaimSection:
    """One claim with its plots, drawn here or brought along."""

    claim: Claim
    plots: list[Plot]
    pictures: list[Picture]
    environment: list[tuple[str, str]]

    @property
    def tone(self) -> str:
        """How the verdict is set."""
        return TONES.get(self.claim.verdict, "quiet")


@dataclass(frozen=True)
class DrillSection:
    """One drill: its faults as a table, its judgement in words."""

    drill: Drill
    table: Table

    @property
    def passed(self) -> bool:
        """Whether it ended as if nothing had happened."""
        return self.drill.identical is True and self.drill.exit_code in (0, None)


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


@dataclass(frozen=True)
class Report:
    """Everything that the templates show."""

    inventory: Inventory
    findings: Findings
    runs_table: Table
    families: list[FamilySection]
    claims: list[ClaimSection]
    claims_table: Table
    drills: list[DrillSection]
    environments: Table
    shared_environment: list[tuple[str, str]]
    runs: list[RunSection]
    tiles: list[tuple[str, str, str, str]]
    """Heading, figure, words, tone."""

    @property
    def plots(self) -> list[Plot]:
        """Every plot, to be written as a file."""
        found = [plot for section in self.families for plot in (*section.layouts.plots, *section.learning.plots)]
        return found + [plot for claim in self.claims for plot in claim.plots]

    @property
    def period(self) -> str:
        """When the runs were begun."""
        moments = sorted(run.record.started_at for run in self.inventory.runs if run.record.started_at)
        if not moments:
            return ""
        first, last = moments[0], moments[-1]
        return _moment(first) if first == last else f"{_moment(first)} to {_moment(last)}"


def build_report(output: Path) -> Report:
    """Everything below `output`, read and judged."""
    inventory, findings = read_runs(output), read_findings(output)
    families = find_families(inventory.runs)
    style = styles(families)
    environments = _environments(inventory.runs)
    sections = [
        FamilySection(family, comparison_table(family), layout_plots(family, style), learning_plots(family, style))
        for family in families
    ]
    claims = [_claim_section(measured) for measured in findings.claims]
    return Report(
        inventory,
        findings,
        _runs_table(inventory, environments),
        sections,
        claims,
        _claims_table(claims),
        [DrillSection(drill, _drill_table(drill)) for drill in findings.drills],
        *_environment_tables(environments),
        [_run_section(run, environments) for run in reversed(inventory.runs)],
        _tiles(inventory, families, findings),
    )


def run_anchor(run: Run | BrokenRun) -> str:
    """Where the run's section is."""
    return f"run-{slug(run.name)}"


def _anchor_of_environment(letter: str) -> str:
    return f"environment-{letter.lower()}"


def _runs_table(inventory: Inventory, environments: Mapping[str, list[Run]]) -> Table:
    columns = [
        Column("experiment"),
        Column("layout"),
        Column("seed", True),
        Column("status"),
        Column("weights", hint="the same letter: the same weights, to the bit"),
        Column("accuracy", True),
        Column("loss", True),
        Column("samples/s", True),
        Column("steps", True),
        Column("seconds", True),
        Column("started (UTC)"),
        Column("env", hint="environment"),
    ]
    letters = digest_letters(inventory.runs)
    place = {run.path: letter for letter, runs in environments.items() for run in runs}
    rows = [_runs_row(run, letters, place[run.path]) for run in reversed(inventory.runs)]
    for broken in inventory.broken:
        head, _, tail = broken.name.rpartition("/")
        label = re.sub(r"-\d{8}T\d{6}Z-.*", "", tail)
        row = [text(head), text(label, link=run_anchor(broken)), figure(None), text("unreadable", "bad")]
        rows.append([*row, *[text(None)] * (len(columns) - len(row))])
    return Table(columns, rows)


def _runs_row(run: Run, letters: Mapping[str, str], environment: str) -> list[Cell]:
    loss = run.result("test_loss")
    loss = run.result("train_loss") if loss is None else loss
    accuracy, digest = run.result("test_accuracy"), run.record.weights_sha256 or ""
    letter = letters.get(digest)
    return [
        text(run.experiment),
        text(way_of(run), link=run_anchor(run)),
        figure(run.seed, str(run.seed)),
        text(run.status, TONES[run.status]),
        Cell(
            f"{letter} · {digest[:8]}" if letter else digest[:8] or values.ABSENT, letter or digest[:8] or None, "code"
        ),
        figure(accuracy, values.percent(accuracy)),
        figure(loss, number(loss, 4)),
        figure(run.result("samples_per_second")),
        figure(run.last_step, f"{run.last_step:,}" if run.last_step is not None else None),
        figure(run.result("seconds")),
        Cell(_moment(run.record.started_at)[5:], run.record.started_at),
        text(environment, link=_anchor_of_environment(environment)),
    ]


def _moment(stamp: str | None) -> str:
    """An ISO stamp without its letters, to the minute."""
    return stamp.replace("T", " ").removesuffix("Z")[:16] if stamp else values.ABSENT


def _claim_section(measured: MeasuredClaim) -> ClaimSection:
    claim = measured.claim
    facts = [(name, _plain(value)) for name, value in flatten(claim.environment).items()]
    return ClaimSection(claim, claim_plots(claim), measured.pictures, facts)


def _claims_table(sections: Sequence[ClaimSection]) -> Table:
    columns = [Column("id"), Column("claim"), Column("verdict"), Column("measured")]
    rows = [
        [
            text(section.claim.id, link=f"claim-{slug(section.claim.id)}"),
            text(section.claim.title),
            text(section.claim.verdict, section.tone),
            text(section.claim.reason),
        ]
        for section in sections
    ]
    return Table(columns, rows)


def unit(word: str) -> str:
    """A unit as it is set behind a number."""
    return TIMES if word == "x" else (f" {word}" if word else "")


def interval(item: Any) -> str:
    """The value, and its interval in brackets."""
    if isinstance(item.value, bool):
        return "yes" if item.value else "no"
    if not isinstance(item.value, int | float):
        return values.ABSENT if item.value is None else str(item.value)
    shown = f"{number(item.value)}{unit(item.unit)}"
    if item.low is None or item.high is None:
        return shown
    return f"{shown} [{number(values.finite(item.low))}, {number(values.finite(item.high))}]"


def _drill_table(drill: Drill) -> Table:
    columns = [
        Column("fault"),
        Column("at step", True),
        Column("noticed after (s)", True),
        Column("training again after (s)", True),
        Column("steps lost", True),
        Column("outcome"),
    ]
    rows = [
        [
            text(fault.name),
            *(figure(part) for part in (fault.at_step, fault.noticed_seconds, fault.resumed_seconds, fault.steps_lost)),
            text(fault.outcome, TONES.get(fault.outcome or "", "bad")),
        ]
        for fault in drill.faults
    ]
    return Table(columns, rows)


def _environments(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs by environment, under letters; the host's name makes no environment, containers have one each."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(json.dumps(_facts_that_count(run), sort_keys=True, default=str), []).append(run)
    return {_column_letters(index): members for index, members in enumerate(found.values())}


def _facts_that_count(run: Run) -> dict[str, Any]:
    facts = {
        name: value for name, value in flatten(run.record.environment).items() if name not in ("host", "memory_bytes")
    }
    commit = facts.get("code.commit")
    facts |= {"code.commit": commit[:12]} if isinstance(commit, str) else {}
    return facts | {
        f"fingerprint.{name}": run.record.fingerprint.get(name)
        for name in ("cpu_capability", "threads", "deterministic")
    }


def _column_letters(index: int) -> str:
    return ("" if index < 26 else _column_letters(index // 26 - 1)) + chr(ord("A") + index % 26)


def _environment_tables(environments: Mapping[str, list[Run]]) -> tuple[Table, list[tuple[str, str]]]:
    """What differs, one row per environment; and what all share."""
    records = {letter: _facts_that_count(runs[0]) for letter, runs in environments.items()}
    shared, differing = [], []
    for name in dict.fromkeys(name for record in records.values() for name in record):
        shown = [_plain(record.get(name)) for record in records.values()]
        if len(set(shown)) > 1:
            differing.append((name, shown))
        elif shown[0] != values.ABSENT:
            shared.append((name, shown[0]))
    columns = [Column("env"), Column("runs", True), Column("hosts"), Column("memory", True)]
    rows = []
    for index, (letter, runs) in enumerate(environments.items()):
        hosts = sorted({str(run.record.environment.get("host") or values.ABSENT) for run in runs})
        memory = values.finite(runs[0].record.environment.get("memory_bytes"))
        told = [figure(len(runs), str(len(runs))), text(_few(hosts)), figure(memory, values.size(memory))]
        rows.append([text(letter), *told, *(text(shown[index]) for _, shown in differing)])
    return Table([*columns, *(Column(name) for name, _ in differing)], rows), shared


def _few(words: Sequence[str]) -> str:
    return ", ".join(words[:3]) + (" …" if len(words) > 3 else "")


def _plain(value: Any) -> str:
    if value is None or value == "":
        return values.ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _run_section(run: Run, environments: Mapping[str, list[Run]]) -> RunSection:
    record = run.record
    letter = next((letter for letter, runs in environments.items() if run in runs), values.ABSENT)
    facts = [
        ("layout", run.layout.description),
        ("reduction", record.options.reduction),
        ("launcher", record.options.launcher),
        ("started", _moment(record.started_at)),
        ("finished", _moment(record.finished_at)),
        ("exit code", values.ABSENT if record.exit_code is None else str(record.exit_code)),
        ("environment", letter),
        ("other options than the defaults", _changed_options(run)),
    ]
    digests = [
        ("weights", record.weights_sha256),
        ("optimizer", record.optimizer_sha256),
        ("data", record.data_sha256),
        ("experiment", record.experiment_sha256),
    ]
    return RunSection(
        run,
        run_anchor(run),
        facts,
        [(name, _plain(value)) for name, value in flatten(record.experiment).items()],
        _attempts(run),
        [(name, digest or values.ABSENT) for name, digest in digests],
        _log_tail(run.path),
    )


def _changed_options(run: Run) -> str:
    defaults = Options().model_dump(mode="json")
    own = run.raw.get("options")
    if not isinstance(own, dict):
        return values.ABSENT
    told = ("reduction", "launcher", "output", "data_dir")
    changed = [f"{name}={_plain(own[name])}" for name in own if name not in told and defaults.get(name) != own[name]]
    return ", ".join(changed) or "none"


def _attempts(run: Run) -> Table:
    rows = []
    for index, attempt in enumerate(run.record.attempts):
        layout = attempt.get("layout")
        restarts = attempt.get("restart_count")
        started = attempt.get("started_at")
        shown = _layout_label(layout) if isinstance(layout, dict) else values.ABSENT
        rows.append(
            [
                figure(index + 1, str(index + 1)),
                text(started),
                text(shown),
                figure(values.finite(restarts), _plain(restarts)),
            ]
        )
    return Table([Column("attempt", True), Column("started"), Column("layout"), Column("restart", True)], rows)


def _layout_label(record: Mapping[str, Any]) -> str:
    try:
        return Layout.model_validate({name: record[name] for name in Layout.model_fields if name in record}).label
    except ValueError:
        return _plain(dict(record))


def _log_tail(path: Path) -> str:
    try:
        with (path / "log.txt").open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 4000))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-12:])


def _tiles(inventory: Inventory, families: Sequence[Family], findings: Findings) -> list[tuple[str, str, str, str]]:
    statuses = Counter(run.status for run in inventory.runs)
    statuses.update(["unreadable"] * len(inventory.broken))
    words = " · ".join(f"{count} {status}" for status, count in statuses.items()) or "none yet"
    tiles = [("Runs", str(statuses.total()), words, "")]
    judged = [family for family in families if family.verdict.tone != "quiet"]
    good = sum(1 for family in judged if family.verdict.tone == "good")
    if judged:
        words = f"of {plural(len(judged), 'experiment')} compared end with the same weights on every layout"
        words = words.replace("end", "ends", 1) if good == 1 else words
        tiles.append(("Digests", str(good), words, "good" if good == len(judged) else "bad"))
    if findings.claims:
        verdicts = Counter(measured.claim.verdict for measured in findings.claims)
        words = " · ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        tiles.append(("Claims", str(len(findings.claims)), words, ""))
    if findings.drills:
        faults = [fault for drill in findings.drills for fault in drill.faults]
        recovered = sum(1 for fault in faults if fault.outcome == "recovered")
        tone = "good" if recovered == len(faults) else "bad"
        tiles.append(("Faults", f"{recovered}/{len(faults)}", "of the drilled faults recovered", tone))
    return tiles
