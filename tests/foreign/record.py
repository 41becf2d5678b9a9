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


def missing(case: Case, known: Mapping[str, Row]) -> tuple[str, ...]:
    """The columns that the case has not run in with the versions that are installed."""
    row = known.get(case.key)
    if row is None or row["versions"] != versions(case.group):
        return COLUMNS
    return tuple(way for way in COLUMNS if way not in row["outcomes"])


def keep(case: Case, found: Mapping[str, Any], commit: str, kept: Path = KEPT) -> None:
    """Put what `driver.run` has found into the case's row, in the place of what is older."""
    known, date = rows(kept), datetime.now(UTC).strftime("%Y-%m-%d")
    row: Row = {"case": case.key, **found, "versions": versions(case.group), "commit": commit, "date": date}
    older = known.get(case.key)
    if older is not None and older["versions"] == row["versions"]:
        together = older["outcomes"] | row["outcomes"]
        row["outcomes"] = {way: together[way] for way in COLUMNS if way in together}
        row["said"] = {way: said for way, said in older["said"].items() if way not in found["outcomes"]} | row["said"]
        row["on"] = older["on"] | row["on"]
        if len(found["outcomes"]) < len(row["outcomes"]):
            row["seconds"] = round(older["seconds"] + row["seconds"], 1)
            row["commit"] = ", ".join(dict.fromkeys([*older["commit"].split(", "), commit]))
    known[case.key] = row
    place = {each.key: number for number, each in enumerate(every_case())}
    ordered = sorted((row for row in known.values() if row["case"] in place), key=lambda row: place[row["case"]])
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in ordered)
    replace_file(kept, f"[\n{lines}\n]\n")
