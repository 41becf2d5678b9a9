"""Whole runs whose disk goes away, or that may not have what they need: 4, with place and the system's name."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.faults.launches import Watch, check_aftermath, launched, train_words
from tests.faults.matrix import record_row
from tests.support.commands import Ended, run_workers, wait_until
from tests.support.mounts import ext4, see_instead, shut_down, tmpfs
from tests.support.processes import HANG


def said_once(ended: Ended, *patterns: str) -> None:
    """Check that the run ended with 4, and told of that in one line with all of these."""
    assert ended.code == 4, ended.errors
    lines = ended.errors.splitlines()
    errors = [line for line in lines if "error: " in line]
    assert len(errors) == 1, ended.errors
    assert "Traceback" not in ended.errors
    assert "please report" not in ended.errors
    assert all(re.search(pattern, errors[0]) for pattern in patterns), errors[0]


def hurt(output: Path, ranks: int, harm: Callable[[], object]) -> Ended:
    """How a run below `output` ends that meets `harm` after its third step."""
    words = train_words(output, *(["--layout", "single"] if ranks == 1 else []), ranks=ranks)
    with launched(*words, pause=0.02) as launch:
        Watch(output).wait_for_step(3)
        harm()
        return launch.end()


def _keep_full(directory: Path, until: Callable[[], bool]) -> None:
    """Take all room, and again what the run gives back meanwhile: that would do for its next micro-batches."""
    with (directory / "others").open("ab", buffering=0) as others:
        while not until():
            try:
                others.write(bytes(4096))
            except OSError:
                time.sleep(0.001)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_whose_directory_is_removed_says_so(tmp_path: Path, ranks: int) -> None:
    output = tmp_path / "outputs"

    def remove() -> None:
        (run,) = output.glob("dots/*")
        run.rename(tmp_path / "elsewhere")

    said_once(hurt(output, ranks, remove), r"\(ENOENT\); was it removed", str(output / "dots"))
    assert not list(output.glob("dots/*"))
    record_row(33, "4, with the path, ENOENT, and 'was it removed or renamed meanwhile?'")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_file_system_is_shut_down_says_so(tmp_path: Path, ranks: int) -> None:
    with ext4(tmp_path / "disk") as disk:
        said_once(
            hurt(disk / "outputs", ranks, partial(shut_down, disk)), r"\((EIO|ESHUTDOWN)\); the disk, or the way to it"
        )
    record_row(34, "shut down: 4, with the path, EIO, and where to look")


@pytest.mark.slow
def test_a_run_whose_file_system_becomes_read_only_says_so(tmp_path: Path) -> None:
    with ext4(tmp_path / "disk") as disk:
        mount = shutil.which("mount") or "mount"
        # What the kernel does by itself to a file system with damaged blocks.
        remount = partial(subprocess.run, [mount, "-o", "remount,abort", disk], check=True)
        said_once(hurt(disk / "outputs", 1, remount), r"\(EROFS\); give an output directory", "dmesg")
    record_row(34, "read-only from now on: 4, with the path and EROFS")


@pytest.mark.slow
def test_a_disk_without_an_answer_is_told_and_waited_for(tmp_path: Path, digest: str) -> None:
    with ext4(tmp_path / "disk") as disk:
        output = disk / "outputs"
        with launched(*train_words(output, "--guard", "off", "--timeout", "120"), pause=0.02) as launch:
            Watch(output).wait_for_step(3)
            # What waits for a file server that is mounted "hard" is in the same state.
            subprocess.run(["fsfreeze", "--freeze", disk], check=True)
            try:
                wait_until(lambda: "no answer from a disk" in launch.said()[1], HANG, "the wait is told")
            finally:
                subprocess.run(["fsfreeze", "--unfreeze", disk], check=True)
            ended = launch.end()
        assert ended.code == 0, ended.errors
        assert re.search(r"rank \d.* \(node 0\) has had no answer from a disk or a file server for 15 s", ended.errors)
        assert len(check_aftermath(output, digest)["attempts"]) == 1
    record_row(34, "no answer: said after 15 s with the ranks; goes on once it answers, same weights")


def _see_as_shared_memory(directory: Path, rank: int) -> None:
    see_instead(Path("/dev/shm"), directory)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_whose_shared_memory_is_filled_by_others_says_so_at_once(tmp_path: Path, ranks: int) -> None:
    output = tmp_path / "outputs"
    words = train_words(output, "--workers", "1", "--guard", "off", "--set", "epochs=100000", ranks=ranks)
    with tmpfs(tmp_path / "shm", "size=4m") as shared, ThreadPoolExecutor(1) as beside:
        run = beside.submit(run_workers, words, ranks, partial(_see_as_shared_memory, shared))
        Watch(output).wait_for_step(3)
        started = time.monotonic()
        _keep_full(shared, run.done)
        first, *others = sorted(run.result(), key=lambda ended: ended.code)
        seconds = time.monotonic() - started
    said_once(first, r"/dev/shm is full, it has 4\.2 MB in all", "--shm-size", "--workers 0")
    assert all(ended.code == 4 or "lost rank" in ended.errors for ended in others)
    record_row(31, "filled by others in mid-run: 4, with what it has in all, and the setting", {"all left": seconds})


def _limit_open_files(rank: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))


def test_too_few_open_files_are_refused_before_they_run_out(tmp_path: Path) -> None:
    words = ["train", "toy_mlp", "--device", "cpu", "--workers", "2", "--output", str(tmp_path)]
    [ended] = run_workers(words, 1, _limit_open_files)
    said_once(ended, r"about \d+ open files are needed \(EMFILE\): a process may have 24 here; raise `ulimit -n`")
    record_row(35, "open files: 4 before step 0, with how many are needed and `ulimit -n`")
