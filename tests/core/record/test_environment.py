"""What the record says about the code: a working tree whose state cannot be read is not called clean."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_core.record.environment import describe_code, version_line

COMMIT = "0123456789abcdef"


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a `git` that the test writes; no other program is on the search path."""
    monkeypatch.delenv("DDP_GIT_COMMIT", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "git"


def answer(git: Path, status: str) -> None:
    """Let `git rev-parse` print COMMIT, and `git status` run the shell line `status`."""
    git.write_text(f'#!/bin/sh\ncase "$3" in\nrev-parse) echo {COMMIT} ;;\nstatus) {status} ;;\nesac\n')
    git.chmod(0o755)


@pytest.mark.parametrize(
    ("status", "dirty"),
    [(":", False), ("echo ' M file'", True), ("exit 128", None), ("echo ' M file'; exit 1", None)],
    ids=["clean", "changed", "failed", "failed half way"],
)
def test_a_failed_status_is_not_clean(git: Path, status: str, dirty: bool | None) -> None:
    answer(git, status)
    code = describe_code()
    assert (code["commit"], code["dirty"]) == (COMMIT, dirty)


def test_without_git_nothing_is_known(git: Path) -> None:
    assert not git.exists()
    code = describe_code()
    assert (code["commit"], code["dirty"]) == (None, None)


@pytest.mark.parametrize(
    ("said", "dirty"), [("true", True), ("false", False), ("unknown", None), ("", None), (None, None)]
)
def test_an_image_says_what_it_was_built_from(
    monkeypatch: pytest.MonkeyPatch, said: str | None, dirty: bool | None
) -> None:
    monkeypatch.setenv("DDP_GIT_COMMIT", COMMIT)
    monkeypatch.delenv("DDP_GIT_DIRTY", raising=False)
    if said is not None:
        monkeypatch.setenv("DDP_GIT_DIRTY", said)
    code = describe_code()
    assert (code["commit"], code["dirty"]) == (COMMIT, dirty)


@pytest.mark.parametrize(
    ("commit", "dirty", "shown"),
    [
        (COMMIT, "true", "(commit 0123456789ab, changed since)"),
        (COMMIT, "false", "(commit 0123456789ab)"),
        ("unknown", "unknown", "(commit unknown)"),
    ],
    ids=["changed", "clean", "built without make"],
)
def test_the_version_of_an_image_says_its_commit_or_that_it_is_unknown(
    monkeypatch: pytest.MonkeyPatch, commit: str, dirty: str, shown: str
) -> None:
    monkeypatch.setenv("DDP_GIT_COMMIT", commit)
    monkeypatch.setenv("DDP_GIT_DIRTY", dirty)
    assert f" {shown}, torch " in version_line()
