"""A record counts as one of the same code while nothing that computes has changed since, whatever else has."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tools import same_code

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

IDENTITY = ["-c", "user.name=a", "-c", "user.email=a@b"]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one file that computes and one that does not."""
    monkeypatch.setattr(same_code, "ROOT", tmp_path)
    monkeypatch.setattr(same_code, "describe_code", lambda: described(tmp_path))
    (tmp_path / "ddp_core").mkdir()
    git(tmp_path, "init", "--quiet")
    return tmp_path


def git(place: Path, *words: str) -> str:
    return subprocess.run(["git", *IDENTITY, *words], cwd=place, check=True, capture_output=True, text=True).stdout


def described(place: Path) -> dict[str, object]:
    dirty = git(place, "status", "--porcelain") != ""
    return {"version": "1.0", "commit": git(place, "rev-parse", "HEAD").strip(), "dirty": dirty}


def committed(place: Path, file: str, content: str) -> dict[str, object]:
    (place / file).write_text(content)
    git(place, "add", file)
    git(place, "commit", "--quiet", "--message", file)
    return same_code.code_here()


def test_a_commit_of_records_is_the_same_code_and_one_of_what_computes_is_not(checkout: Path) -> None:
    first = committed(checkout, "ddp_core/sum.py", "1")
    second = committed(checkout, "records.json", "[]")
    assert same_code.is_same(first, second)
    third = committed(checkout, "ddp_core/sum.py", "2")
    assert not same_code.is_same(second, third)


def test_changes_that_are_not_committed_count_where_they_compute(checkout: Path) -> None:
    first = committed(checkout, "ddp_core/sum.py", "1")
    (checkout / "records.json").write_text("[]")
    assert same_code.code_here() == first
    (checkout / "ddp_core" / "sum.py").write_text("2")
    changed = same_code.code_here()
    assert changed["dirty"] is True
    assert not same_code.is_same(first, changed)
    assert not same_code.is_same(changed, first)


def test_what_is_not_known_is_not_the_same(checkout: Path) -> None:
    here = committed(checkout, "ddp_core/sum.py", "1")
    for code in (None, {}, {"version": "1.0", "commit": None, "dirty": False}, here | {"dirty": None}):
        assert not same_code.is_same(code, here)
    assert not same_code.is_same(here | {"commit": "c" * 40}, here)
