"""The points of a save, and a disk that is full while the data are written (row 8 of the fault matrix)."""

from __future__ import annotations

import errno
import functools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.refusals import human_bytes
from ddp_core.checkpoint import Checkpointer, find_checkpoints, newest_valid
from ddp_core.checkpoint.committing import POINTS
from ddp_core.checkpoint.state import StateTensors
from tests.core.checkpoint.children import save_under_a_file_limit, state_of
from tests.core.checkpoint.saved import REFERENCE, is_whole, leftovers, save_steps, saved
from tests.support.mounts import tmpfs
from tests.support.processes import ask


@pytest.mark.parametrize("asynchronous", [False, True], ids=["now", "aside"])
@pytest.mark.parametrize("limit", [100_000, 1_000])
def test_a_file_limit_is_a_full_disk_and_the_checkpoint_before_loads(
    tmp_path: Path, limit: int, asynchronous: bool
) -> None:
    saved(tmp_path, 10)
    where, code, message = ask(save_under_a_file_limit, tmp_path, limit, asynchronous)
    assert (where, code) == ("check" if asynchronous else "save", ExitCode.RESOURCES)
    assert "file too large (EFBIG): needs 307.1 kB" in message
    assert f"`ulimit -f` allows {'100.0 kB' if limit == 100_000 else '1.0 kB'} for {tmp_path}" in message
    assert leftovers(tmp_path) == set()
    assert find_checkpoints(tmp_path)[0].step == 10
    assert is_whole(newest_valid(tmp_path))


def test_a_full_disk_is_seen_before_and_during_the_write(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "size=800k") as directory:
        filler = directory / "filler"

        def fill(point: str) -> None:
            if point == "data opened":
                with filler.open("wb") as file:
                    while True:
                        try:
                            os.write(file.fileno(), bytes(4096))
                        except OSError:
                            return

        saved(directory, 10)
        for options in ({"at": fill}, {}):
            with pytest.raises(UserError, match=r"disk full: needs 307\.1 kB, has \d+ bytes for .*/small/") as caught:
                Checkpointer(directory, **options).save(state_of(20), step=20, epoch=0)
            assert caught.value.exit_code == ExitCode.RESOURCES
            assert leftovers(directory) == {"filler"}
            assert is_whole(newest_valid(directory))
        filler.unlink()
        Checkpointer(directory).save(state_of(20), step=20, epoch=0)
        assert find_checkpoints(directory)[0].step == 20


def test_every_point_of_a_save_is_passed_in_the_documented_order(tmp_path: Path) -> None:
    passed: list[str] = []
    checkpointer = Checkpointer(tmp_path, keep_last=1, at=passed.append)
    checkpointer.save(state_of(10), step=10, epoch=0, best=True)
    passed.clear()
    checkpointer.save(state_of(20), step=20, epoch=0, best=True)
    assert passed == list(POINTS)
    text = REFERENCE.read_text().partition("## The order of the writes")[2]
    places = [text.index(f"`{point}`") for point in POINTS]
    assert places == sorted(places)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("where", ["shutil.disk_usage", "sync"])
def test_what_the_disk_refuses_names_the_file_and_what_it_would_have_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, where: str
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    free = iter([1 << 40])  # there was room when the save began
    if where == "sync":
        answer = functools.partial(SimpleNamespace, f_frsize=1, f_blocks=99, f_bfree=99, f_files=9, f_favail=9)
        monkeypatch.setattr(os, "statvfs", lambda path: answer(f_bavail=next(free, 10)))
    with Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(f"ddp_core.checkpoint.committing.{where}", refuse)
        with pytest.raises(UserError, match=r"step-000000003.*\.pt") as raised:
            save_steps(checkpointer, 3)
    assert raised.value.exit_code == ExitCode.RESOURCES
    assert isinstance(raised.value.__cause__, OSError)
    assert errno.errorcode[number] in str(raised.value) or number == errno.ENOSPC
    if number == errno.ENOSPC and where == "sync":
        needed = human_bytes(StateTensors(state_of(3)).bytes_needed())
        assert f"needs {needed}, has 10 bytes for {tmp_path}" in str(raised.value)
    assert list(tmp_path.iterdir()) == []
