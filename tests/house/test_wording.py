"""Each test that compares wording has its own kept, no other has, and another wording is noticed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.wording import UPDATE, kept_wording, refusing, said_as_before

TESTS = Path(__file__).parents[1]
FOLDERS = sorted(
    {path.parent for path in TESTS.rglob("test_*.py")} | {path.parent for path in TESTS.rglob("wording.json")}
)


def compares_wording(function: ast.AST) -> bool:
    called = {
        node.func.id for node in ast.walk(function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return not called.isdisjoint({"refusing", "said_as_before"})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(TESTS)))
def test_wording_is_kept_of_the_tests_that_compare_it(folder: Path) -> None:
    compare = {
        f"{path.name}::{node.name}"
        for path in folder.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and compares_wording(node)
    }
    assert {test.partition("[")[0] for test in kept_wording(folder)} == compare


def test_another_wording_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said_as_before(f"a file of this test: {tmp_path}/file")
    with refusing(ValueError):
        raise ValueError("one that is kept")
    monkeypatch.delenv(UPDATE, raising=False)
    with pytest.raises(AssertionError):
        said_as_before("not what is kept for this test")
