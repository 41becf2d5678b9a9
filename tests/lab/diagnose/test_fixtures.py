"""Each script with a known bug is named by it first; its clean twin is not blamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lab.diagnose import cases
from tests.lab.diagnose.cases import CASES, FIXTURES
from tests.support.commands import Ended, command


def diagnose(folder: Path, *words: str) -> tuple[Ended, dict[str, Any]]:
    """How `ddp diagnose` ended, and what it found."""
    ended = command("diagnose", "--json", folder / "found.json", *words, cwd=folder)
    assert ended.code in (0, 1), ended.errors
    return ended, json.loads((folder / "found.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_bug_is_named_first_and_its_clean_twin_is_not_blamed(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    script = str(FIXTURES / f"{name}.py")
    ended, told = diagnose(tmp_path, *cases.options(case), script)
    assert (ended.code, told["findings"][0]["name"]) == (1, case.finding), ended.output
    ended, told = diagnose(tmp_path, *cases.options(case), script, "--mended")
    assert (ended.code, [each["name"] for each in told["findings"] if each["severity"] == "bug"]) == (0, [])
    assert not told["notes"]


def test_the_page_has_every_finding_and_every_script() -> None:
    assert f"{cases.BEGIN}\n\n{cases.between_marks()}\n\n{cases.END}" in cases.PAGE.read_text(), (
        "python -m tests.lab.diagnose.cases"
    )
    assert {file.stem for file in FIXTURES.glob("*.py")} == {*CASES, "usual"}
