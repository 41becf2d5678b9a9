"""The fault matrix: the tests that produce each fault of docs/evidence/faults.md, and the limits of its times.

`record_row` records what a test has seen, and fails the test where that took longer than the row allows. As a plugin of
pytest (`-p tests.faults.matrix`, with DDP_FAULT_RECORDS) this module records which tests of the rows have passed.
`python -m tests.faults.document` writes the records into the table of docs/evidence/faults.md.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.faults.scenarios import SCENARIOS

RECORDS = "DDP_FAULT_RECORDS"
"""Environment variable: the folder that records are written to; without it none are."""

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "evidence" / "faults.md"

NOTICED = "noticed"
"""From the fault to the first message of a process that is left."""
AGAIN = "trains again"
"""From the fault to the next step after it."""
LATE = "noticed after --timeout"
"""From the moment at which nothing had been heard for --timeout to the message."""
COMMAND = "command"
"""From the start of the command's Python to its end, without the time in which it waited for a core."""
REFUSAL = "refusal"
"""From the start of `ddp` in a process that has loaded torch to its end."""

LIMITS: dict[int, dict[str, float]] = {
    1: {NOTICED: 1, AGAIN: 10},
    2: {NOTICED: 1, AGAIN: 10},
    3: {NOTICED: 2},
    4: {"workers gone": 2},
    5: {LATE: 1},
    6: {LATE: 1},
    21: {REFUSAL: 5},
    24: {COMMAND: 2},
    26: {LATE: 1},
    30: {COMMAND: 1},
}
"""The most seconds that a time may take, by row and by what is measured."""

IN_CONTAINERS = {2, 3, 5, 6, 7, 8, 16, 28}
"""The rows that drills in containers produce; all but 6 and 16 are produced on processes, too."""

ALSO: dict[str, tuple[int, ...]] = {
    "tests/faults/test_losses.py::test_a_killed_worker_is_named_where_its_peer_left_sooner": (1,),
    "tests/faults/test_saves.py::test_a_damaged_checkpoint_is_passed_over": (10, 11),
    **dict.fromkeys(
        (
            "tests/core/checkpoint/test_data_file.py::test_a_full_disk_is_seen_before_and_during_the_write",
            "tests/core/checkpoint/test_data_file.py::test_a_file_limit_is_a_full_disk_and_the_checkpoint_before_loads",
        ),
        (8,),
    ),
    "tests/core/test_bad_input.py::test_bad_input_is_refused_before_anything_is_started": (18, 21, 23),
    "tests/distributed/test_layouts.py::test_plain_reduction_with_a_ragged_end_leaves_nobody_waiting": (17,),
    "tests/core/distributed/test_stop.py::test_a_stopped_run_ends_elsewhere_as_if_nothing_had_happened": (28, 29),
    "tests/core/record/test_lock.py::test_the_second_run_in_a_directory_is_told_who_holds_it": (30,),
}
"""Tests of rows that record nothing, or whose source does not say for which row."""


@functools.cache
def recording_tests() -> dict[str, set[int]]:
    """The tests on processes whose source has a call of `record_row`, each with its rows."""
    found: dict[str, set[int]] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        name, text = file.relative_to(ROOT).as_posix(), file.read_text()
        if "record_row(" in text and not name.startswith("tests/docker/") and name != "tests/faults/test_matrix.py":
            for test in ast.parse(text).body:
                if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
                    found[f"{name}::{test.name}"] = {
                        call.args[0].value
                        for call in ast.walk(test)
                        if isinstance(call, ast.Call) and ast.unparse(call.func) == "record_row"
                        if isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, int)
                    }
    return found


@dataclass(frozen=True)
class Row:
    """One fault, in the words of the page.

    `where`: P if it is tested on processes, D in containers. `tests`: those on processes, as FILE::FUNCTION, or with a
    [PARAMETER]. `limits`: the most seconds that a time may take, by what is measured; `record_row` has these names.
    """

    number: int
    fault: str
    expected: str

    @property
    def limits(self) -> Mapping[str, float]:
        return LIMITS.get(self.number, {})

    @property
    def tests(self) -> list[str]:
        of_all = [*recording_tests().items(), *ALSO.items()]
        named = [test for test, rows in of_all if self.number in rows]
        follows = "tests/faults/test_nodes.py::test_what_must_follow_does"
        return named + [f"{follows}[{each.name}]" for each in SCENARIOS if each.row == self.number]

    @property
    def where(self) -> str:
        return ", ".join(["P"] * bool(self.tests) + ["D"] * (self.number in IN_CONTAINERS))


def _rows() -> tuple[Row, ...]:
    lines = re.findall(r"^\| (\d+) (.*?) \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    return tuple(Row(int(number), fault, expected) for number, fault, expected in lines)


ROWS = _rows()


def record_row(row: int, outcome: str, times: Mapping[str, float] | None = None, by: str | None = None) -> None:
    """Record in a few words what a run has done about fault number `row`, and how many seconds what took.

    `by`: the test or drill that has seen the outcome; by default the test that runs now.

    Raises AssertionError where a time is above its limit in the row. Without a folder for the records nothing is done:
    seconds tell something about the program only on a machine with little else to do, where they are recorded.
    """
    if folder := os.environ.get(RECORDS):
        test = by or os.environ.get("PYTEST_CURRENT_TEST", "").partition(" (")[0]
        seconds = {what: round(took, 3) for what, took in (times or {}).items()}
        record = {"row": row, "outcome": outcome, "seconds": seconds, "test": test, "measured": here_and_now()}
        name = re.sub(r"\W+", "-", test.rpartition("::")[2]) or uuid.uuid4().hex
        _write(Path(folder), f"row-{row:02d}-{name}.json", record)
        if late := above_limits(row, seconds):
            raise AssertionError(f"row {row}: {late}")


def rows_of(test: str) -> list[int]:
    """The rows that name this test, whose name may have parameters."""
    return [row.number for row in ROWS if {test, test.partition("[")[0]} & set(row.tests)]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write `test-<name>.json` with the rows that name the test, its outcome and its seconds."""
    folder, rows = os.environ.get(RECORDS), rows_of(report.nodeid)
    if folder and rows and (report.when == "call" or report.skipped):
        record = {"rows": rows, "test": report.nodeid, "result": report.outcome, "seconds": report.duration}
        _write(Path(folder), f"test-{re.sub(r'[^A-Za-z0-9]+', '-', report.nodeid)}.json", record)


def _write(folder: Path, name: str, record: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(record) + "\n")


def above_limits(row: int, seconds: Mapping[str, float]) -> dict[str, float]:
    """Those of the times that are above their limits in the row."""
    limits = ROWS[row - 1].limits
    return {what: took for what, took in seconds.items() if took > limits.get(what, float("inf"))}


def here_and_now() -> dict[str, Any]:
    """The date, this machine, how busy it is, and which commit was tried."""
    from benchmarks.record import machine
    from ddp_core.record.environment import describe_code

    about, code = machine(), describe_code()
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    return {
        "date": day,
        **{name: about[name] for name in ("cores", "cpu", "torch")},
        "load": round(os.getloadavg()[0], 1),
        "commit": f"{str(code['commit'])[:7]}{', changed since' if code['dirty'] else ''}",
    }
