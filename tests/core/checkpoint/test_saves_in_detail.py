"""What a save writes, removes, refuses and says, each where the usual tests look at something else."""

from __future__ import annotations

import datetime
import errno
import functools
import hashlib
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
from ddp_core.checkpoint import Checkpointer, Fence, Superseded, find_checkpoints, load, newest_valid
from ddp_core.checkpoint.data_file import DataFile
from ddp_core.checkpoint.loading import difference
from ddp_core.checkpoint.manifest import Damaged, DataPart, data_name, read_manifest, taken_together
from ddp_core.checkpoint.parts import CutTensor, put_together, whole_tensors
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


def test_a_fence_is_asked_and_heard(tmp_path: Path) -> None:
    for answer in (True, None):
        with Checkpointer(tmp_path, fence=lambda answer=answer: answer) as checkpointer:
            save(checkpointer, 1)
    with (
        Checkpointer(tmp_path, fence=lambda: False) as checkpointer,
        pytest.raises(Superseded, match="no longer write"),
    ):
        save(checkpointer, 2)
    with pytest.raises(Superseded, match=r"its fence.json is gone \(this process has 7\)"):
        Fence(tmp_path, 7).check()
    with pytest.raises(FileNotFoundError):
        Fence(tmp_path / "nowhere", 7).check()
    fence = Fence.take(tmp_path, patience=3.5)
    assert (fence.directory, fence.token, fence.patience) == (tmp_path, 1, 3.5)
    Fence.take(tmp_path)
    with pytest.raises(Superseded, match=rf"process {os.getpid()} on .* took over with token 2 \(this process has 1\)"):
        fence.check()


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


def test_a_disk_has_room_for_exactly_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"weights": torch.ones(100_000), "step": 1}
    needed = StateTensors(state).bytes_needed()
    with Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr("ddp_core.checkpoint.committing.free_bytes", lambda path: needed - 1)
        with pytest.raises(
            UserError, match=f"needs {human_bytes(needed)}, has {human_bytes(needed - 1)} for .*step-000000001"
        ) as raised:
            checkpointer.save(state, step=1, epoch=0)
        assert raised.value.exit_code == ExitCode.RESOURCES
        monkeypatch.setattr("ddp_core.checkpoint.committing.free_bytes", lambda path: needed)
        checkpointer.save(state, step=1, epoch=0)
    assert find_checkpoints(tmp_path)[0].bytes <= needed


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


def test_a_data_file_alone_is_hashed_and_its_first_error_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DataFile(tmp_path / "data") as data:
        assert data.write(memoryview(b"abcd").cast("H")) == 4
        data.raise_write_error()
        assert (data.written, data.sha256[:8]) == (4, "88d4266f")
        monkeypatch.setattr("ddp_core.base.files.NewFile.write", lambda *_: (_ for _ in ()).throw(OSError(5, "first")))
        assert data.write(b"ef") == 2
        assert data.write(b"gh") == 2
        with pytest.raises(OSError, match="first"):
            data.raise_write_error()
        assert data.written == 6


def test_differences_are_told_for_some_names_and_counted_for_the_rest() -> None:
    shapes = {f"w{number}": ["float32", [2]] for number in range(9)}
    assert difference(shapes, shapes) is None
    first = {name: shapes[name] for name in list(shapes)[:1]}
    told = difference({}, shapes)
    assert told is not None
    listed = told.removeprefix("missing in it: ").partition(" and ")[0].split(", ")
    assert listed == list(shapes)[: len(listed)]
    assert told.endswith(f" and {9 - len(listed)} more")
    assert difference(first, {}) == "unexpected in it: w0"
    few = {name: shapes[name] for name in listed}
    assert difference({}, few) == f"missing in it: {', '.join(few)}"
    assert difference(first, {"w0": ["float64", [2]]}) == "w0 is float32 [2] there, float64 [2] here"


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


def test_all_damages_are_counted_and_the_newest_is_told(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        save(checkpointer, 1, 2)
    for step in (1, 2):
        read_manifest(tmp_path / f"step-00000000{step}.json").path.write_bytes(b"x" * step)
    with pytest.raises(UserError, match=r"2 found, all damaged \(the newest: step-000000002.*\.pt has 2 bytes"):
        newest_valid(tmp_path)


def sealed(path: Path, **fields: Any) -> None:
    """Change fields of a manifest, and its seal with them."""
    content = {name: value for name, value in json.loads(path.read_text()).items() if name != "seal"} | fields
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps(content | {"seal": hashlib.sha256(text.encode()).hexdigest()}))


def test_a_manifest_of_another_format_or_without_a_seal_is_damaged(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        save(checkpointer, 1)
    path = tmp_path / "step-000000001.json"
    sealed(path)
    assert read_manifest(path).step == 1
    sealed(path, format="ddp-checkpoint/9")
    with pytest.raises(Damaged, match="format"):
        read_manifest(path)
    path.write_text(json.dumps({"format": "ddp-checkpoint/1"}))
    with refusing(Damaged):
        read_manifest(path)


def test_parts_are_named_together_by_the_first_and_a_digest_of_their_digests() -> None:
    parts = [DataPart("a", 1, "12"), DataPart("b", 20, "34"), DataPart("c", 300, "56")]
    assert taken_together(parts) == DataPart("a", 321, hashlib.sha256(b"123456").hexdigest())
    assert data_name(7, 1, None) == "step-000000007.pt"
    assert data_name(7, 2, None) == "step-000000007-2.pt"
    assert data_name(7, 3, (0, 2)) == "step-000000007-3.part-1-of-2.pt"


def test_a_tensor_in_pieces_keeps_its_dtype_and_its_order_in_memory() -> None:
    whole = torch.arange(6, dtype=torch.float64).view(3, 2).t()
    flat = torch.arange(6, dtype=torch.float64)
    content = {"state": {"w": None, "x": 5}, "strides": {"w": [1, 2]}, "tied": {}, "pieces": {"w": {0: flat[:4]}}}
    contents = [content, {"pieces": {"w": {4: flat[4:]}}}]
    shapes = {"w": ["float64", [2, 3]]}
    state = put_together(contents, shapes)
    assert torch.equal(whole_tensors(state)["w"], whole)
    assert whole_tensors(state)["w"].stride() == whole.stride()
    assert state["w"].elements(3, 5).tolist() == [3, 4]
    none = CutTensor(torch.float64, (0,), (1,), {})
    assert (none.elements(0, 0).dtype, none.elements(0, 0).numel()) == (torch.float64, 0)
    with refusing(Damaged):
        put_together(contents, {})
    with refusing(Damaged):
        put_together([content | {"pieces": {}}], shapes)
