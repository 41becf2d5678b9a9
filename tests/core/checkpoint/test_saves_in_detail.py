"""What a save writes, removes, refuses and says, each where the usual tests look at something else."""

from __future__ import annotations

import datetime
import errno
import functools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.refusals import human_bytes
from ddp_core.checkpoint import Checkpointer, Fence, find_checkpoints, load, newest_valid
from ddp_core.checkpoint.state import StateTensors
from tests.core.checkpoint.children import state_of
from tests.support.wording import refusing


def save(checkpointer: Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save(state_of(step), step=step, epoch=0)


@pytest.fixture
def in_tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def is_now(text: str) -> bool:
    written = datetime.datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.UTC)
    return abs((datetime.datetime.now(datetime.UTC) - written).total_seconds()) < 120


@pytest.mark.usefixtures("in_tokyo")
def test_times_are_those_of_greenwich(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        save(checkpointer, 1)
        assert is_now(checkpointer.last.written_at)
    Fence.take(tmp_path)
    content = json.loads((tmp_path / "fence.json").read_text())
    assert is_now(content["since"])
    assert content["holder"].startswith(f"process {os.getpid()} on ")


def test_a_step_is_saved_again_beside_its_damaged_manifest(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        save(checkpointer, 1)
        (tmp_path / "step-000000001.json").write_text("{}")
        save(checkpointer, 1)
        first = checkpointer.last.path
        assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [1]
        save(checkpointer, 1)
        assert not first.exists()
        checkpointer.last.path.unlink()  # somebody else has removed what the next save replaces
        save(checkpointer, 1)
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [1]


@pytest.mark.parametrize("data", ["whole", "removed"])
@pytest.mark.parametrize("manifest", ["whole", "{}"])
def test_an_old_checkpoint_goes_with_its_data_also_where_one_of_both_is_damaged(
    tmp_path: Path, manifest: str, data: str
) -> None:
    (tmp_path / "notes.txt").write_text("of the user")
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        save(checkpointer, 1)
        old = checkpointer.last
        if data == "removed":
            old.path.unlink()
        if manifest != "whole":
            old.manifest.write_text(manifest)
        save(checkpointer, 2)
        new = checkpointer.last
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["latest.json", "notes.txt", new.manifest.name, new.path.name]
    )


def test_files_named_before_are_synced_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[Path, bool]] = []
    manifest = tmp_path / "step-000000001.json"
    monkeypatch.setattr("ddp_core.checkpoint.committing.sync", lambda path: synced.append((path, manifest.exists())))
    before = [tmp_path / "metrics.jsonl", tmp_path / "log.txt"]
    with Checkpointer(tmp_path, synced_before=before) as checkpointer:
        save(checkpointer, 1)
    assert [(path, False) for path in (tmp_path, *before)] == synced[:3]
    assert (tmp_path, True) in synced


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("where", ["free_bytes", "sync"])
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
            save(checkpointer, 3)
    assert raised.value.exit_code == ExitCode.RESOURCES
    assert isinstance(raised.value.__cause__, OSError)
    assert errno.errorcode[number] in str(raised.value) or number == errno.ENOSPC
    if number == errno.ENOSPC and where == "sync":
        needed = human_bytes(StateTensors(state_of(3)).bytes_needed())
        assert f"needs {needed}, has 10 bytes for {tmp_path}" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_part_under_a_key_with_dots_in_its_names_is_compared(tmp_path: Path) -> None:
    state = {"model": {"a.b": torch.ones(2), "c": {"d": torch.ones(1)}}, "optimizer": {"e": torch.ones(3)}}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state, step=1, epoch=0)
    checkpoint = newest_valid(tmp_path)
    assert checkpoint is not None
    shapes = {name: shape for name, shape in checkpoint.shapes.items() if name.startswith("model")}
    assert len(shapes) == 2
    assert load(checkpoint, expect=shapes, only=["model"])["optimizer"]["e"].tolist() == [1, 1, 1]
    with refusing():
        load(checkpoint, expect=shapes)
