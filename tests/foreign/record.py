"""The outcomes of all cases, kept in docs/reference/foreign.json: one line for each case, the newest one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from ddp_core.base.files import replace_file
from tests.foreign.fleet import GROUPS, Case, every_case

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "reference" / "foreign.json"
Row = dict[str, Any]


def rows(kept: Path = KEPT) -> dict[str, Row]:
    """The outcome of each case that has run, by its key, in the order of the fleet."""
    return {row["case"]: row for row in json.loads(kept.read_text())} if kept.exists() else {}


def versions(group: str) -> dict[str, str]:
    """What a case's outcome belongs to: the versions of torch and of the packages of its group.

    Raises PackageNotFoundError where one of them is not installed.
    """
    return {package: metadata.version(package) for package in ("torch", *GROUPS[group])}


def is_current(case: Case, known: Mapping[str, Row]) -> bool:
    """Whether the case has run with the versions that are installed."""
    return case.key in known and known[case.key]["versions"] == versions(case.group)


def keep(case: Case, found: Mapping[str, Any], commit: str, kept: Path = KEPT) -> None:
    """Put what `driver.run` has found in the place of the case's older row."""
    known, date = rows(kept), datetime.now(UTC).strftime("%Y-%m-%d")
    known[case.key] = {"case": case.key, **found, "versions": versions(case.group), "commit": commit, "date": date}
    place = {each.key: number for number, each in enumerate(every_case())}
    ordered = sorted((row for row in known.values() if row["case"] in place), key=lambda row: place[row["case"]])
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in ordered)
    replace_file(kept, f"[\n{lines}\n]\n")
