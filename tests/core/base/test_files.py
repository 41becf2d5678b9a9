"""Files that appear whole or not at all, and locks."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from pathlib import Path

import psutil
import pytest

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import NewFile, replace_file, take_lock, target_of
from ddp_core.base.refusals import refusal
from ddp_core.record.lock import RunLock


@pytest.mark.parametrize("durable", [False, True])
def test_new_content_takes_the_place_of_the_old(tmp_path: Path, durable: bool) -> None:
    target = tmp_path / "file.json"
    replace_file(target, b"\x00old", durable=durable)
    assert target.read_bytes() == b"\x00old"
    replace_file(target, "né", durable=durable)
    assert target.read_text(encoding="utf-8") == "né"
    assert list(tmp_path.iterdir()) == [target]


def write_half(target: Path) -> None:
    with NewFile(target) as new:
        new.write(b"half")
        raise KeyError


def test_a_failure_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "file"
    replace_file(target, "old")
    with pytest.raises(KeyError):
        write_half(target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "nowhere" / "file", "new")


def test_the_file_may_be_read_by_whom_other_new_files_may(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    replace_file(tmp_path / "replaced", "")
    assert (tmp_path / "replaced").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_temporary_file_tells_what_it_was_to_become_and_is_locked(tmp_path: Path) -> None:
    with NewFile(tmp_path / "file.json") as new, new.temporary.open() as reader:
        assert target_of(new.temporary.name) == "file.json"
        assert not take_lock(reader.fileno())
    assert target_of("file.json") is None
    assert target_of(".file.json.tmp") is None


def test_nothing_is_left_where_a_file_system_has_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    before = psutil.Process().num_fds()
    with pytest.raises(OSError, match="No locks available") as failure:
        replace_file(tmp_path / "file", "content")
    with pytest.raises(
        UserError, match=r"run\.lock: No locks available \(ENOLCK\); its file system has no locks"
    ) as told:
        RunLock(tmp_path / "run").acquire()
    assert psutil.Process().num_fds() == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert str(refusal(failure.value)).startswith(f"cannot use {tmp_path / 'file'}: No locks available")
    assert told.value.exit_code == ExitCode.RESOURCES


def test_a_lock_is_exclusive_or_shared(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    one, other = (os.open(tmp_path / "lock", os.O_RDONLY) for _ in range(2))
    try:
        assert take_lock(one, shared=True)
        assert take_lock(other, shared=True)
        assert not take_lock(other)
    finally:
        os.close(one)
        os.close(other)


def test_a_lock_is_waited_for_as_long_as_asked(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    one, other = (os.open(tmp_path / "lock", os.O_RDONLY) for _ in range(2))
    try:
        assert take_lock(one)
        started = time.monotonic()
        assert not take_lock(other, patience=0.1)
        assert time.monotonic() - started >= 0.1
        threading.Timer(0.05, os.close, args=(one,)).start()
        assert take_lock(other, patience=30)
    finally:
        os.close(other)
