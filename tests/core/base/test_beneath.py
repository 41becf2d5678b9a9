"""Files of a directory that a stranger may have filled: no link is followed to write, and no pipe is waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_core.base.beneath import NotAFile, make_folder_beneath, open_beneath, open_file, remove_beneath
from ddp_core.base.documents import BadDocument, read_document
from ddp_core.base.errors import UserError
from ddp_core.base.files import LineFile, replace_file
from ddp_core.base.shown import shown
from ddp_core.checkpoint import Checkpointer, Fence
from ddp_core.observe.heartbeat import clear_heartbeats
from ddp_core.record.lock import RunLock, is_held
from tests.support.wording import refusing


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("log.txt", lambda run: LineFile(run / "log.txt")),
        ("run.lock", lambda run: RunLock(run).acquire()),
        ("fence.lock", Fence.take),
    ],
)
def test_a_link_is_refused_by_name_and_its_target_stays(
    tmp_path: Path, name: str, write: Callable[[Path], object]
) -> None:
    (run := tmp_path / "run").mkdir()
    (victim := tmp_path / "victim").write_text("dear")
    (run / name).symlink_to(victim)
    with pytest.raises(UserError, match=f"{name} is a link") as refused:
        write(run)
    assert refused.value.exit_code == 2
    assert victim.read_text() == "dear"


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
    for flags in (os.O_WRONLY, os.O_RDWR):
        with refusing():
            open_beneath(pipe, flags | os.O_CREAT)


def test_text_of_files_does_not_act() -> None:
    assert shown("a\x1b[2J\nb\u202e\x9b") == r"a\x1b[2J\nb\u202e\x9b"
    assert shown("a\n\tb\x1b", lines=True) == "a\n\tb\\x1b"
