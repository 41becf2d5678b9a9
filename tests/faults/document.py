"""Writes the table in docs/evidence/faults.md from what the tests of the fault matrix have recorded.

Its first two columns are written by hand: they are the matrix's faults and what a run must do about each.

    python -m tests.faults.document              run the tests on processes, slow ones too, and write the table
    python -m tests.faults.document RECORDS …    add the records in these folders, such as those of drills in containers

All records are kept in benchmarks/results/faults.json. A test's new records replace its old records.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
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
    """One line per row of the matrix, in Markdown, and below them how the tests ended, and on which machines."""
    records = list(records)
    seen = [record for record in records if "outcome" in record]
    lines = ["| fault | what a run must do | seconds |", "|---|---|---|"]
    for row in ROWS:
        times = longest(row, [record for record in seen if record["row"] == row.number])
        lines.append(f"| {row.number} {row.fault} | {row.expected} | {times} |")
    ended = Counter(record["result"] for record in records if "result" in record)
    counts = ", ".join(f"{count} {result}" for result, count in sorted(ended.items(), reverse=True))
    lines += ["", f"Tests: {counts or 'none'}. Measured:", ""]
    places: dict[str, list[dict[str, Any]]] = {}
    for record in seen:
        places.setdefault(place_of(record), []).append(record["measured"])
    return "\n".join([*lines, *(f"- {place}{busy(measured)}" for place, measured in sorted(places.items()))]) + "\n"


def place_of(record: dict[str, Any]) -> str:
    """When and on which machine and commit a record was measured, in words."""
    about = record["measured"]
    machine = f"{about['cores']} cores of {about['cpu']}, torch {about['torch']}"
    return f"{about['date']}: {machine}, commit {about['commit']}"


def busy(measured: Iterable[dict[str, Any]]) -> str:
    """How busy the machine was, where its records tell."""
    known = [about["load"] for about in measured if about["load"] is not None]
    return f", load average {min(known):.1f} to {max(known):.1f}" if known else ""


def longest(row: Row, seen: Iterable[dict[str, Any]]) -> str:
    """The longest of each time of the row, with its limit."""
    times: dict[str, list[float]] = {}
    for record in seen:
        for what, took in record["seconds"].items():
            times.setdefault(what, []).append(took)
    limits = {what: f" of {row.limits[what]:g}" if what in row.limits else "" for what in times}
    return "; ".join(f"{what} {max(took):.2f}{limits[what]}" for what, took in times.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
