"""The plugin of `make test-rotation`: which slow tests run, and on which day each has last passed."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from tests.support.commands import command

TODAY, LONG_AGO = date.today().isoformat(), "2020-01-01"

TESTS = """
def test_first(): pass
def test_second(): pass
def test_broken(): assert False
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    return tmp_path


def rotate(project: Path, passed: dict[str, str], *words: str) -> tuple[int, str, dict[str, str]]:
    """Run the tests of a project; returns the exit code, the output, and the days written down."""
    days = project / "tests" / "rotation.json"
    days.write_text(
        json.dumps({"begun": TODAY, "passed": {f"test_it.py::{name}": day for name, day in passed.items()}})
    )
    plugin = ("-m", "pytest", "-p", "tests.support.rotation", "-p", "no:cacheprovider")
    ended = command("-v", *words, program=plugin, cwd=project)
    written = json.loads(days.read_text())["passed"]
    return ended.code, ended.output, {test.removeprefix("test_it.py::"): day for test, day in written.items()}


def test_a_test_that_passes_has_the_day_and_one_that_fails_keeps_the_last(project: Path) -> None:
    code, output, days = rotate(project, {"test_broken": "2026-01-01"})
    assert code == 1
    assert days == {"test_broken": "2026-01-01", "test_first": TODAY, "test_second": TODAY}
    assert "3 slow tests, 0 without a day" in output
    assert "has not passed since 2026-01-01: test_it.py::test_broken" in output
    # One that is overdue fails the session, too.
    known = {"test_first": TODAY, "test_second": LONG_AGO}
    assert rotate(project, known, "--rotation-seconds", "-1")[0] == 1


def test_what_another_session_writes_meanwhile_is_kept(project: Path) -> None:
    beside = {"begun": TODAY, "passed": {"test_it.py::test_first": LONG_AGO, "test_it.py::test_broken": TODAY}}
    (project / "test_it.py").write_text(
        f"def test_first(): open('tests/rotation.json', 'w').write({json.dumps(beside)!r})\ndef test_broken(): assert 0"
    )
    assert rotate(project, {})[2] == {"test_first": TODAY, "test_broken": TODAY}
