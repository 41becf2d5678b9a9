"""The fault matrix is complete: each row has tests that exist, and the page with its table can be written."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from ddp_core.observe.faults import KINDS
from tests.faults import document
from tests.faults.matrix import COMMAND, PAGE, RECORDS, ROOT, ROWS, above_limits, record_row
from tests.support.wording import refusing


def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_rows_are_numbered_without_a_gap() -> None:
    assert [row.number for row in ROWS] == list(range(1, 37))


def test_every_row_on_processes_has_tests_that_exist() -> None:
    for row in ROWS:
        # Containers alone show a network that is cut, and a kernel that kills for want of memory.
        assert row.tests or row.number in (6, 16), f"row {row.number} has no test"
        for test in row.tests:
            file, _, name = test.partition("::")
            assert name.partition("[")[0] in functions(file), test


def test_a_time_above_its_limit_is_recorded_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RECORDS, str(tmp_path))
    with refusing(AssertionError):
        record_row(30, "refused", {COMMAND: 1.01})
    [record] = document.read(tmp_path)
    assert record["seconds"] == {COMMAND: 1.01}


def test_every_time_in_what_a_run_must_do_is_a_limit() -> None:
    for row in ROWS:
        said = {float(number) for number in re.findall(r"(\d+) s\b", row.expected)}
        assert said <= set(row.limits.values()), f"row {row.number}"


def test_every_row_on_the_page_has_an_outcome_a_date_and_times_within_its_limits() -> None:
    records = [record for record in document.known() if "outcome" in record]
    for row in ROWS:
        seen = [record for record in records if record["row"] == row.number]
        for letter in row.where.split(", "):
            own = [record for record in seen if record["outcome"].startswith("D: ") == (letter == "D")]
            assert own, f"row {row.number}, {letter}"
        for record in seen:
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["measured"]["date"])
            assert above_limits(row.number, record["seconds"]) == {}
        timed = {what for record in seen for what in record["seconds"]}
        assert row.limits.keys() <= timed, f"row {row.number}: {row.limits.keys() - timed} was never measured"


def test_the_page_names_every_scripted_fault_and_has_what_is_recorded() -> None:
    page = PAGE.read_text()
    assert all(f"`{kind}@" in page for kind in KINDS)
    assert document.table(document.known()) in page
