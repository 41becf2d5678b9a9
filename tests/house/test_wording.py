"""The kept wording is that of tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.wording import UPDATE, kept_wording, refusing, said_as_before

TESTS = Path(__file__).parents[1]
FOLDERS = sorted(path.parent for path in TESTS.rglob("wording.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(TESTS)))
def test_no_wording_is_kept_of_a_test_that_is_gone(folder: Path) -> None:
    there = {
        f"{path.name}::{name}"
        for path in folder.glob("test_*.py")
        for name in re.findall(r"^ *def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert {test.partition("[")[0] for test in kept_wording(folder)} <= there


def test_another_wording_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said_as_before(f"a file of this test: {tmp_path}/file, and process 12", hide=r"\d+")
    with refusing(ValueError):
        raise ValueError("one that is kept")
    monkeypatch.delenv(UPDATE, raising=False)
    with pytest.raises(AssertionError):
        said_as_before("not what is kept for this test")
