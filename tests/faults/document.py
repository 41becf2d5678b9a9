"""Writes the table in docs/reference/faults.md from what the tests of the fault matrix have recorded.

    python -m tests.faults.document              run the tests on processes, slow ones too, and write the table
    python -m tests.faults.document RECORDS …    add the records in these folders, such as those of drills in containers

All records are kept in docs/reference/faults.json. A test's new records replace its old records.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.record import machine
from tests.faults.matrix import RECORDS, ROWS, Row

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
PAGE, KEPT = REFERENCE / "faults.md", REFERENCE / "faults.json"
MACHINE = "the machine"
BEGIN, END = "<!-- begin: python -m tests.faults.document -->", "<!-- end -->"


def main(folders: list[str]) -> int:
    """Write the page's table; return pytest's exit code, or 0 if no test was run."""
    if folders:
        write(merge(known(), [record for folder in folders for record in read(Path(folder))]))
        return 0
    about = machine() | {"load": round(os.getloadavg()[0], 1), "date": datetime.now(UTC).strftime("%Y-%m-%d")}
    with tempfile.TemporaryDirectory(prefix="ddp-records-") as folder:
        code = run_tests(Path(folder))
        others = [record for record in known() if record["test"] != MACHINE and not is_of_processes(record)]
        write(merge(others, [{"test": MACHINE, **about}, *read(Path(folder))]))
    return code


def run_tests(folder: Path) -> int:
    """Run every test that the matrix names, with records in `folder`; return pytest's exit code."""
    tests = sorted({test for row in ROWS for test in row.tests})
    words = ["-p", "tests.faults.recording", "-q", *tests]
    settings = os.environ | {RECORDS: str(folder)}
    return subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, env=settings, check=False).returncode


def is_of_processes(record: dict[str, Any]) -> bool:
    """Whether the record comes from a test that the matrix names."""
    return any(record["test"].partition("[")[0] in row.tests for row in ROWS)


def known() -> list[dict[str, Any]]:
    """The records in docs/reference/faults.json."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else []


def merge(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The new records, and the old records of all other tests."""
    tests = {record["test"] for record in new}
    return [*(record for record in old if record["test"] not in tests), *new]


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
    """One line per row of the matrix, in Markdown."""
    records = list(records)
    lines = [
        "| # | fault | what a run must do | seen on processes (P), in containers (D) | seconds | tests |",
        "|---|---|---|---|---|---|",
    ]
    lines += [line(row, records) for row in ROWS]
    notes = [note for note in map(colophon, records) if note]
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def colophon(record: dict[str, Any]) -> str:
    """A sentence on where and when the tests on processes ran; empty for any other record."""
    if record.get("test") != MACHINE:
        return ""
    load = f", load average {record['load']} before the start" if "load" in record else ""
    return f"Processes: {record['date']}, {record['cores']} cores of {record['cpu']}, torch {record['torch']}{load}."


def line(row: Row, records: list[dict[str, Any]]) -> str:
    """One line of the table: the fault, what must happen, what was seen, the longest time, how the tests ended."""
    seen = [record for record in records if record.get("row") == row.number]
    tests = [record for record in records if row.number in record.get("rows", [])]
    outcomes = list(dict.fromkeys(cell(record["outcome"]) for record in seen))
    seconds = [record["seconds"] for record in seen if record.get("seconds") is not None]
    longest = f"{max(seconds):.1f}" if seconds else ""
    cells = [row.number, cell(row.fault), cell(row.expected), "; ".join(outcomes), longest, verdict(tests, row)]
    return "| " + " | ".join(map(str, cells)) + " |"


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
