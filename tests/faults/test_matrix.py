"""The fault matrix is complete: each row has tests that exist, and the page with its table can be written."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from ddp_core.faults import KINDS
from tests.faults import document
from tests.faults.matrix import RECORDS, ROWS, record_row

ROOT = Path(__file__).parents[2]


def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_rows_are_numbered_without_a_gap() -> None:
    assert [row.number for row in ROWS] == list(range(1, 33))


def test_every_row_on_processes_has_tests_that_exist() -> None:
    for row in ROWS:
        assert row.tests or "P" not in row.where.split(", "), f"row {row.number} has no test"
        for test in row.tests:
            file, _, name = test.partition("::")
            assert name in functions(file), test


def test_no_test_of_the_matrix_is_left_out_of_it() -> None:
    named = {test for row in ROWS for test in row.tests}
    for file in ("losses", "nodes", "numbers", "places", "requests", "saves"):
        path = f"tests/faults/test_{file}.py"
        tests = {f"{path}::{name}" for name in functions(path) if name.startswith("test_")}
        assert tests <= named


def test_a_row_is_recorded_where_a_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_row(6, "nowhere to write, nothing written")
    monkeypatch.setenv(RECORDS, str(tmp_path / "records"))
    record_row(6, "the minority | left", 7.25)
    records = document.read(tmp_path / "records")
    assert [(record["row"], record["outcome"], record["seconds"]) for record in records] == [
        (6, "the minority | left", 7.25)
    ]
    held = {"rows": [6, 7], "test": "a", "result": "passed", "seconds": 1.0}
    (tmp_path / "records" / "test-a.json").write_text(json.dumps(held))
    lines = document.table(document.read(tmp_path / "records")).splitlines()
    assert len(lines) == 2 + len(ROWS)
    assert "the minority \\| left | 7.2 | 1 passed |" in lines[7]
    assert lines[8].endswith("|  |  | 1 passed |")


def test_new_records_take_the_place_of_the_same_test_only() -> None:
    old = [{"row": 1, "test": "a", "outcome": "old"}, {"row": 2, "test": "b", "outcome": "kept"}]
    new = [{"row": 1, "test": "a", "outcome": "new"}, {"row": 3, "test": "a", "outcome": "more"}]
    assert [record["outcome"] for record in document.merge(old, new)] == ["kept", "new", "more"]


def test_the_page_names_every_scripted_fault_and_every_row() -> None:
    page = document.PAGE.read_text()
    assert all(f"`{kind}@" in page for kind in KINDS)
    assert all(f"\n| {row.number} | {row.fault} |" in page for row in ROWS)
