"""Environments: on which machines and packages the runs were made, and where these differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddp_core.config.records import dotted
from ddp_lab.report import values
from ddp_lab.report.reading.runs import Run
from ddp_lab.report.values import Column, Table, figure, plain, text


def find_environments(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Return the runs by environment, under letters.

    The host's name does not tell environments apart, because each container has a name of its own.
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(json.dumps(_facts_that_count(run), sort_keys=True, default=str), []).append(run)
    return {_column_letters(index): members for index, members in enumerate(found.values())}


def environment_anchor(letter: str) -> str:
    """Return the anchor of the environment on the page."""
    return f"environment-{letter.lower()}"


def environments_table(environments: Mapping[str, Sequence[Run]]) -> tuple[Table, list[tuple[str, str]]]:
    """Return what differs, one row per environment; and the facts that all share."""
    records = {letter: _facts_that_count(runs[0]) for letter, runs in environments.items()}
    shared, differing = [], []
    for name in dict.fromkeys(name for record in records.values() for name in record):
        shown = [plain(record.get(name)) for record in records.values()]
        if len(set(shown)) > 1:
            differing.append((name, shown))
        elif shown[0] != values.ABSENT:
            shared.append((name, shown[0]))
    columns = [Column("env"), Column("runs", True), Column("hosts"), Column("memory", True)]
    rows = []
    for index, (letter, runs) in enumerate(environments.items()):
        hosts = sorted({str(run.record["environment"].get("host") or values.ABSENT) for run in runs})
        memory = values.finite(runs[0].record["environment"].get("memory_bytes"))
        told = [figure(len(runs), str(len(runs))), text(_few(hosts)), figure(memory, values.size(memory))]
        rows.append([text(letter), *told, *(text(shown[index]) for _, shown in differing)])
    return Table([*columns, *(Column(name) for name, _ in differing)], rows), shared


def _facts_that_count(run: Run) -> dict[str, Any]:
    facts = {
        name: value for name, value in dotted(run.record["environment"]).items() if name not in ("host", "memory_bytes")
    }
    commit = facts.get("code.commit")
    facts |= {"code.commit": commit[:12]} if isinstance(commit, str) else {}
    return facts | {
        f"fingerprint.{name}": run.record["fingerprint"].get(name)
        for name in ("cpu_capability", "threads", "deterministic")
    }


def _column_letters(index: int) -> str:
    """A to Z, then AA, AB and so on, as a spreadsheet's columns."""
    return ("" if index < 26 else _column_letters(index // 26 - 1)) + chr(ord("A") + index % 26)


def _few(words: Sequence[str]) -> str:
    return ", ".join(words[:3]) + (" …" if len(words) > 3 else "")
