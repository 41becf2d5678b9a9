"""Files that appear whole or not at all; in a stranger's directory no link is followed to write, no pipe waited for.

Tests base/shown.py, too.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import psutil
import pytest

from ddp_core.base.beneath import NotAFile, make_folder_beneath, open_beneath, open_file, remove_beneath
from ddp_core.base.documents import BadDocument, read_document
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import NewFile, replace_file, take_lock, target_of
from ddp_core.base.refusals import refusal
from ddp_core.base.shown import shown
from ddp_core.checkpoint import Checkpointer, Fence
from ddp_core.observe.heartbeat import clear_heartbeats
from ddp_core.record.lock import RunLock, is_held
from tests.support.wording import refusing


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


def test_nothing_is_written_or_removed_through_a_folder_that_is_a_link(tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "rank-0.json").write_text("dear")
    for name in ("heartbeats", "checkpoints"):
        (run / name).symlink_to(elsewhere)
    with refusing():
        clear_heartbeats(run)
    with refusing():
        replace_file(run / "heartbeats" / "rank-0.json", "", root=run)
    with refusing():
        make_folder_beneath(run / "heartbeats")
    with refusing():
        Checkpointer(run / "checkpoints", fence=Fence.take(run))
    (run / "fence.lock").unlink()
    (run / "fence.lock").symlink_to(elsewhere / "rank-0.json")
    with refusing():
        Fence.take(run)
    assert [file.read_text() for file in elsewhere.iterdir()] == ["dear"]


def test_the_directory_itself_may_be_reached_through_a_link(tmp_path: Path) -> None:
    (run := tmp_path / "run" / "heartbeats").mkdir(parents=True)
    (tmp_path / "newest").symlink_to(run.parent)
    place = tmp_path / "newest" / "heartbeats" / "rank-0.json"
    replace_file(place, "{}", root=tmp_path / "newest")
    assert (run / "rank-0.json").read_text() == "{}"
    remove_beneath(place, tmp_path / "newest")
    assert not (run / "rank-0.json").exists()


def test_a_pipe_is_neither_read_nor_written(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "run.lock")
    with pytest.raises(NotAFile):
        open_file(pipe)
    with pytest.raises(BadDocument):
        read_document(pipe, dict)
    assert not is_held(tmp_path)
    for flags in (os.O_WRONLY, os.O_RDWR):  # the system itself refuses the first one, where nobody reads the pipe
        with refusing():
            open_beneath(pipe, flags | os.O_CREAT)


def test_text_of_files_does_not_act() -> None:
    assert shown("a\x1b[2J\nb\u202e\x9b") == r"a\x1b[2J\nb\u202e\x9b"
    assert shown("a\n\tb\x1b", lines=True) == "a\n\tb\\x1b"
