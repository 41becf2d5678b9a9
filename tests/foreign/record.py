"""The outcomes of all cases, kept in benchmarks/results/foreign.json: one line for each case, the newest one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from ddp_core.base.files import replace_file
from tests.foreign.driver import COLUMNS
from tests.foreign.fleet import GROUPS, Case, every_case

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "benchmarks" / "results" / "foreign.json"
Row = dict[str, Any]


def rows(kept: Path = KEPT) -> dict[str, Row]:
    """The outcome of each case that has run, by its key, in the order of the fleet."""
    return {row["case"]: row for row in json.loads(kept.read_text())} if kept.exists() else {}


def versions(group: str) -> dict[str, str]:
    """What a case's outcome belongs to: the versions of torch and of the packages of its group.

    Raises PackageNotFoundError where one of them is not installed.
    """
    return {package: metadata.version(package) for package in ("torch", *GROUPS[group])}


def is_there(case: Case, known: Mapping[str, Row]) -> bool:
    """Whether the case has run in every column with the versions that are installed."""
    row = known.get(case.key)
    return row is not None and row["versions"] == versions(case.group) and row["outcomes"].keys() >= {*COLUMNS}


def keep(case: Case, found: Mapping[str, Any], commit: str, kept: Path = KEPT) -> None:
    """Put what `driver.run` has found into the case's row, in the place of what is older."""
    known, date = rows(kept), datetime.now(UTC).strftime("%Y-%m-%d")
    known[case.key] = {"case": case.key, **found, "versions": versions(case.group), "commit": commit, "date": date}
    ordered = [known[each.key] for each in every_case() if each.key in known]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in ordered)
    replace_file(kept, f"[\n{lines}\n]\n")
