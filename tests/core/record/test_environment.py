"""What the record says about code and packages: a working tree whose state cannot be read is not called clean.

Installed packages are written as pins, and compared with those of a run.

Tests record/pins.py, too.
"""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.record.environment import describe_code, version_line
from ddp_core.record.pins import package_differences, pins

COMMIT = "0123456789abcdef"
HERE = {"python": platform.python_version(), "packages": {"torch": version("torch"), "numpy": version("numpy")}}


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    """What the code was is asked once for a process; here for each test, and by others after it."""
    describe_code.cache_clear()
    yield
    describe_code.cache_clear()


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
def test_a_failed_status_is_not_clean_and_without_git_nothing_is_known(
    git: Path, status: str, dirty: bool | None
) -> None:
    assert describe_code()["commit"] is describe_code()["dirty"] is None
    describe_code.cache_clear()
    answer(git, status)
    code = describe_code()
    assert (code["commit"], code["dirty"]) == (COMMIT, dirty)


def test_what_the_system_refuses_is_not_taken_for_other_code(git: Path) -> None:
    answer(git, ":")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 2, before[1]))
    try:
        with pytest.raises(UserError, match=r"EMFILE.*ulimit -n") as raised:
            describe_code()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert raised.value.exit_code == ExitCode.RESOURCES


@pytest.mark.parametrize(
    ("commit", "said", "dirty", "shown"),
    [
        (COMMIT, "true", True, "(commit 0123456789ab, changed since)"),
        (COMMIT, "false", False, "(commit 0123456789ab)"),
        (COMMIT, "", None, "(commit 0123456789ab)"),
        ("unknown", "unknown", None, "(commit unknown)"),
    ],
    ids=["changed", "clean", "not said", "built without make"],
)
def test_an_image_says_what_it_was_built_from(
    monkeypatch: pytest.MonkeyPatch, commit: str, said: str, dirty: bool | None, shown: str
) -> None:
    monkeypatch.setenv("DDP_GIT_COMMIT", commit)
    monkeypatch.setenv("DDP_GIT_DIRTY", said)
    assert describe_code()["dirty"] is dirty
    assert f" {shown}, torch " in version_line()


def test_pins_are_requirements_of_what_is_installed() -> None:
    lines = pins(HERE).splitlines()
    (numpy,) = [line for line in lines if line.startswith("numpy==")]
    assert re.fullmatch(rf"numpy=={re.escape(version('numpy'))}  # files [0-9a-f]{{64}}", numpy)
    (torch,) = [line for line in lines if line.startswith("torch==")]
    assert torch.startswith(f"torch=={version('torch')}  # files ")
    assert lines[2:] == sorted(lines[2:], key=lambda line: line.removeprefix("# ").partition("==")[0])
    assert package_differences(pins(HERE), HERE).startswith("all ")
    assert f"# samebits=={version('samebits')}" in lines, "pip could not find what is installed from its folder"


def test_the_versions_of_the_record_come_first() -> None:
    record = HERE | {"python": "3.11.0", "packages": {"torch": "2.12.0+cu130", "numpy": "2.0.0", "pillow": None}}
    text = pins(record)
    assert text.startswith("# Python 3.11.0: python -m pip install -r pins.txt --extra-index-url ")
    assert "https://download.pytorch.org/whl/cu130\n" in text
    assert "\ntorch==2.12.0+cu130\n" in text
    said = package_differences(text, record)
    assert f"torch 2.12.0+cu130 there, {version('torch')} here; numpy 2.0.0 there, {version('numpy')} here" in said
    assert "other" not in said


def test_the_rest_is_counted() -> None:
    text = f"# a comment\ntorch=={version('torch')}\nSci_kit.Learn==0.1\nnothing-like-this==1\n# mine==3\n"
    assert package_differences(text, HERE) == "3 packages of 4 differ or are missing here"
    assert package_differences(text, HERE | {"python": "3.9.0"}) == (
        f"python 3.9.0 there, {platform.python_version()} here; 3 other packages of 4 differ or are missing here"
    )
