"""A run directory that a stranger has filled, through real commands: they end in time, and harm nothing elsewhere.

A pipe keeps a careless reader waiting for ever, and a link leads a careless writer to any file of the user.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import Ended, ddp, train, trained
from tests.support.own_project import write_project

LIMIT = 120
"""Seconds, of which a command needs a few: one that waits at a pipe would wait for ever."""
READERS = ("compare", "watch", "verify", "report")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A completed run of an experiment with modules of its own; tests work on copies."""
    folder = tmp_path_factory.mktemp("made")
    file = write_project(folder / "project")
    train(folder / "out", file, "--data-dir", folder / "data", "--checkpoint-every", "2")
    return trained(folder / "out")[0].path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of the run, below an output folder."""
    return shutil.copytree(made, tmp_path / "out" / made.parent.name / made.name)


def put(place: Path, make: Callable[[Path], None]) -> None:
    """Something else in the place of a file."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.parent.mkdir(exist_ok=True)
    make(place)


def resume(made: Path, run: Path) -> Ended:
    """Continue the finished run, which is told to be longer."""
    words = ("--resume", run, "--set", "epochs=2", "--device", "cpu", "--data-dir", run / "data")
    return ddp("train", made.parents[2] / "project" / "mine.py", *words, timeout=LIMIT)


def read_by_all(made: Path, run: Path) -> dict[str, tuple[int, list[str]]]:
    """The exit codes of the commands that read a run directory, and their lines of errors; none has a traceback."""
    output = run.parents[1]
    ended = {
        "compare": ddp("compare", "--no-check", "--output", output, timeout=LIMIT),
        "watch": ddp("watch", "--once", run, timeout=LIMIT),
        "verify": ddp("verify", run, timeout=LIMIT, module="tests.support.quick"),
        "report": ddp("--output", output, "--to", output / "report", timeout=LIMIT, module="ddp_lab.report"),
        "resume": resume(made, run),
    }
    return {name: (each.code, each.errors.splitlines()) for name, each in ended.items()}


@pytest.mark.parametrize("place", ["run.lock", "log.txt", "metrics.jsonl"])
def test_no_command_waits_at_a_pipe(made: Path, run: Path, place: str) -> None:
    put(run / place, os.mkfifo)
    ended = read_by_all(made, run)
    code, lines = ended.pop("resume")
    assert (code, len(lines)) == (2, 1)
    assert f"{place} is a pipe or a device" in lines[0]
    assert ended == dict.fromkeys(READERS, (0, []))


def test_a_pipe_among_the_kept_code_is_no_code(made: Path, run: Path) -> None:
    put(run / "source" / "beside.py", os.mkfifo)
    ended = read_by_all(made, run)
    code, lines = ended.pop("resume")
    assert (code, len(lines)) == (2, 1)
    assert "beside.py cannot be read (it is a pipe or a device, not a file)" in lines[0]
    assert ended == dict.fromkeys(READERS, (0, [])) | {"verify": (1, [])}


def test_a_pipe_is_no_heartbeat(made: Path, run: Path) -> None:
    put(run / "heartbeats" / "rank-0.json", os.mkfifo)
    assert read_by_all(made, run) == dict.fromkeys((*READERS, "resume"), (0, []))


def test_no_command_reads_a_device_without_end(made: Path, run: Path) -> None:
    put(run / "metrics.jsonl", lambda place: place.symlink_to("/dev/zero"))
    ended = read_by_all(made, run)
    code, lines = ended.pop("resume")
    assert (code, len(lines)) == (2, 1)
    assert "metrics.jsonl is a link" in lines[0]
    assert ended == dict.fromkeys(READERS, (0, []))


@pytest.mark.parametrize("place", ["run.lock", "log.txt", "metrics.jsonl", "checkpoints", "heartbeats"])
def test_a_resume_writes_through_no_link(made: Path, run: Path, tmp_path: Path, place: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    if place in ("checkpoints", "heartbeats"):
        shutil.copytree(run / "checkpoints", elsewhere)
    else:
        elsewhere.write_text("dear\n" * 9)
    before = {file: file.read_bytes() for file in [elsewhere, *elsewhere.rglob("*")] if file.is_file()}
    put(run / place, lambda place: place.symlink_to(elsewhere))
    ended = resume(made, run)
    assert ended.code == 2, ended
    assert f"{place} is a link" in ended.errors
    assert len(ended.errors.splitlines()) == 1, ended.errors
    assert {file: file.read_bytes() for file in [elsewhere, *elsewhere.rglob("*")] if file.is_file()} == before
