"""What the user is told where a checkpoint cannot be written: how much was needed, and how much room there is."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_core.base.errors import ExitCode
from ddp_core.checkpoint import data_file as files
from ddp_core.checkpoint.data_file import disk_full, free_bytes, human_bytes, write_error


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (94_140_000, "94.1 MB"),
        (2.5e9, "2.5 GB"),
        (1e12, "1.0 TB"),
        (4e15, "4000.0 TB"),
    ],
)
def test_a_count_of_bytes_is_said_in_its_unit(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_room_is_what_any_user_may_still_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=3, f_bfree=5, f_frsize=4096))
    assert free_bytes(Path("here")) == 3 * 4096


def test_a_full_disk_is_said_with_what_is_needed_and_what_is_there() -> None:
    error = disk_full(Path("here"), 3000, 20)
    assert str(error).startswith("disk full: needs 3.0 kB, has 20 bytes for here; ")
    assert error.exit_code == ExitCode.RESOURCES


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_that_cannot_be_asked_for_its_room_has_none(number: int, tmp_path: Path) -> None:
    error = write_error(OSError(number, os.strerror(number)), tmp_path / "gone" / "file")
    assert str(error).startswith("disk full: needs 0 bytes, has 0 bytes for ")
    assert error.exit_code == ExitCode.RESOURCES


@pytest.mark.parametrize(
    ("limit", "free", "said"),
    [(2000, 5000, "2.0 kB"), (7000, 5000, "5.0 kB"), (resource.RLIM_INFINITY, 5000, "5.0 kB")],
)
def test_a_limited_file_has_room_up_to_the_limit(
    limit: int, free: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {resource.RLIMIT_FSIZE: (limit, 123_000_000)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(files, "free_bytes", lambda folder: free if folder == tmp_path else 0)
    error = write_error(OSError(errno.EFBIG, "too large"), tmp_path / "file", 9000)
    assert f"needs 9.0 kB, has {said} for {tmp_path / 'file'};" in str(error)


@pytest.mark.parametrize(
    ("met", "said"),
    [(OSError(errno.EACCES, "Permission denied"), "Permission denied"), (OSError("no number"), "no number")],
)
def test_any_other_error_is_said_as_the_system_says_it(met: OSError, said: str) -> None:
    error = write_error(met, Path("file"))
    assert str(error) == f"cannot write file: {said}; give an output directory that this user may write to"
    assert error.exit_code == ExitCode.RESOURCES
