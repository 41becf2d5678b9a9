"""Writes the table in docs/reference/faults.md from what the tests of the fault matrix have recorded.

Its first three columns are written by hand: they are the matrix's faults and what a run must do about each.

    python -m tests.faults.document              run the tests on processes, slow ones too, and write the table
    python -m tests.faults.document RECORDS …    add the records in these folders, such as those of drills in containers

All records are kept in benchmarks/results/faults.json. A test's new records replace its old records.
"""

from __future__ import annotations

import json
import os
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.faults.matrix import PAGE, RECORDS, ROWS, Row

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "benchmarks" / "results" / "faults.json"
BEGIN, END = "<!-- begin: python -m tests.faults.document -->", "<!-- end -->"


def main(folders: list[str]) -> int:
    """Write the page's table; return pytest's exit code, or 0 if no test was run."""
    if folders:
        write(merge(known(), [record for folder in folders for record in read(Path(folder))]))
        return 0
    with tempfile.TemporaryDirectory(prefix="ddp-records-") as folder:
        code = run_tests(Path(folder))
        # Those of processes are made anew, under whichever name.
        others = [record for record in known() if str(record["test"]).startswith("tests/docker/")]
        write(merge(others, read(Path(folder))))
    return code


def run_tests(folder: Path) -> int:
    """Run every test that the matrix names, with records in `folder`; return pytest's exit code."""
    tests = sorted({test for row in ROWS for test in row.tests})
    words = ["-p", "tests.faults.matrix", "-q", *tests]
    settings = os.environ | {RECORDS: str(folder)}
    return subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, env=settings, check=False).returncode


def known() -> list[dict[str, Any]]:
    """The records in benchmarks/results/faults.json."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else []


def merge(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The new records, and the old records of all other tests (a test with other parameters is the same test)."""
    tests = {name_of(record) for record in new}
    return [*(record for record in old if name_of(record) not in tests), *new]


def name_of(record: dict[str, Any]) -> str:
    """The record's test without its parameters."""
    return str(record["test"]).partition("[")[0]


def write(records: list[dict[str, Any]]) -> None:
    """Write the records to faults.json, and the table between the marks in faults.md."""
    KEPT.write_text("[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(records)}\n{END}{after}")


def read(folder: Path) -> list[dict[str, Any]]:
    """All records of a folder, sorted by file name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def table(records: Iterable[dict[str, Any]]) -> str:
    """One line per row of the matrix, in Markdown, and below them the machines."""
    records = list(records)
    letters = machines(records)
    lines = [
        "| # | fault | what a run must do | seen on processes (P), in containers (D) | seconds | tests | measured |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [line(row, records, letters) for row in ROWS]
    notes = [f"- {letter}: {place}{busy(records, place)}" for place, letter in letters.items()]
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def machines(records: Iterable[dict[str, Any]]) -> dict[str, str]:
    """A letter for each machine and commit that something was measured on."""
    places = dict.fromkeys(place_of(record) for record in records if "outcome" in record)
    return dict(zip(sorted(places), string.ascii_lowercase, strict=False))


def place_of(record: dict[str, Any]) -> str:
    """On which machine and commit a record was measured, in words."""
    about = record["measured"]
    commit = f", at commit {about['commit']}" if "commit" in about else ""
    return f"{about['cores']} cores of {about['cpu']}, torch {about['torch']}{commit}"


def busy(records: Iterable[dict[str, Any]], place: str) -> str:
    """How busy a machine was, where its records tell."""
    loads = [record["measured"]["load"] for record in records if "outcome" in record and place_of(record) == place]
    known = [load for load in loads if load is not None]
    return f", load average {min(known):.1f} to {max(known):.1f} meanwhile" if known else ""


def line(row: Row, records: Iterable[dict[str, Any]], letters: Mapping[str, str]) -> str:
    """One row of the table. A row without records has empty cells."""
    seen = [record for record in records if record.get("row") == row.number]
    tests = [record for record in records if row.number in record.get("rows", [])]
    outcomes = list(dict.fromkeys(cell(record["outcome"]) for record in seen))
    dates = sorted({f"{record['measured']['date']} {letters[place_of(record)]}" for record in seen})
    cells = [row.number, row.fault, row.expected, "; ".join(outcomes), longest(row, seen)]
    return "| " + " | ".join(map(str, [*cells, verdict(tests, row), "; ".join(dates)])) + " |"


def longest(row: Row, seen: Iterable[dict[str, Any]]) -> str:
    """The longest of each time of the row, with its limit."""
    times: dict[str, list[float]] = {}
    for record in seen:
        for what, took in record["seconds"].items():
            times.setdefault(what, []).append(took)
    limits = {what: f" of {row.limits[what]:g}" if what in row.limits else "" for what in times}
    return "; ".join(f"{what} {max(took):.2f}{limits[what]}" for what, took in times.items())


def verdict(tests: list[dict[str, Any]], row: Row) -> str:
    """How many of the row's tests passed, failed and were skipped."""
    counts = {result: sum(test["result"] == result for test in tests) for result in ("passed", "failed", "skipped")}
    words = [f"{count} {result}" for result, count in counts.items() if count]
    return ", ".join(words) or ("in containers" if row.where == "D" else "not run")


def cell(text: str) -> str:
    """The text, escaped for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
