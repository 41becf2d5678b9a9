"""What only a close look at checkpoints shows: what is written, removed, refused and said, and races with others."""

from __future__ import annotations

import datetime
import errno
import functools
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.refusals import human_bytes
from ddp_core.checkpoint import (
    Checkpointer,
    Fence,
    Superseded,
    best_checkpoint,
    find_checkpoints,
    load,
    newest_valid,
    sweep,
)
from ddp_core.checkpoint.manifest import Damaged, pointed_step, read_manifest
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


SAVED = r"checkpoint of step {}: \d+(\.\d+)? \w+ in (\d+\.\d{{3}}) s"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_is_told_and_may_be_the_best(tmp_path: Path, asynchronous: bool) -> None:
    lines: list[str] = []
    with Checkpointer(tmp_path, asynchronous=asynchronous, on_event=lines.append) as checkpointer:
        assert checkpointer.last is None
        for step, best in ((1, True), (2, False), (3, False)):
            checkpointer.save(state_of(step), step=step, epoch=0, best=best)
            checkpointer.before_update()
        checkpointer.close()
        assert len(find_checkpoints(tmp_path)) == 3  # two are kept, and the best one
        checkpointer.save(state_of(4), step=4, epoch=0)
    for step, line in enumerate(lines, start=1):
        found = re.fullmatch(
            SAVED.format(step) + (r", training stood still for (\d+\.\d{3}) s" if asynchronous else ""), line
        )
        assert found is not None, line
        assert all(float(seconds) < 60 for seconds in found.groups()[1:])
    best = best_checkpoint(tmp_path)
    assert best is not None
    assert best.step == 1
    assert len(find_checkpoints(tmp_path)) == 3


def test_a_save_that_is_given_up_is_told_with_its_step(tmp_path: Path) -> None:
    lines: list[str] = []
    answers = iter([True])
    with (
        pytest.raises(Superseded),
        Checkpointer(tmp_path, fence=lambda: next(answers, False), on_event=lines.append) as checkpointer,
    ):
        checkpointer.save(state_of(5), step=5, epoch=0)
    assert lines[0].startswith("warning: checkpoint of step 5 given up: this process may no longer write to")


def test_parameters_come_back_as_plain_tensors_and_views_on_their_own(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    state = {"weight": torch.nn.Parameter(torch.ones(2)), "view": whole[2:4], "grown": torch.ones(2).requires_grad_()}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state, step=1, epoch=0)
        assert checkpointer.last is not None
        found = load(checkpointer.last)
    assert [(type(each), each.requires_grad) for each in found.values()] == [(torch.Tensor, False)] * 3
    assert found["view"].tolist() == [2, 3]
    own = StateTensors(state)
    assert [type(each) for each in own.tensors] == [torch.Tensor] * 3
    assert StateTensors({"a": whole}).tensors[0] is whole


MANIFEST = {
    "format": "ddp-checkpoint/1",
    "step": 1,
    "epoch": 0,
    "file": "step-000000001.pt",
    "bytes": 3,
    "sha256": "0" * 64,
    "shapes": {"w": ["float32", [2]]},
    "metadata": {"layout": "single-cpu"},
    "metric": 0.5,
    "written_at": "2026-01-01T00:00:00Z",
}


def test_a_manifest_of_long_ago_can_still_be_read(tmp_path: Path) -> None:
    path = tmp_path / "step-000000001.json"
    path.write_text(json.dumps(MANIFEST | {"seal": "dfea99c8b35171d8bca8b407692193e73847fed4125f0545aa1a4884669968cd"}))
    assert read_manifest(path).metric == 0.5


def test_a_manifest_holds_finite_numbers_only(tmp_path: Path) -> None:
    content = MANIFEST | {"metric": float("nan")}
    seal = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    path = tmp_path / "step-000000001.json"
    path.write_text(json.dumps(content | {"seal": seal}))
    with refusing(Damaged):
        read_manifest(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"format": "ddp-checkpoint/9"},
        {"step": [30]},
        {"step": 2.0},
        {"file": 5},
        {"sha256": 7},
        {"shapes": []},
        {"parts": [7]},
        {"parts": 7},
        {"more": 1},
    ],
    ids=str,
)
def test_a_manifest_with_other_types_counts_as_damaged(tmp_path: Path, fields: dict[str, Any]) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(state_of(step), step=step, epoch=0)
    path = tmp_path / "step-000000002.json"
    content = {name: value for name, value in json.loads(path.read_text()).items() if name != "seal"} | fields
    seal = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    for text in (json.dumps(content | {"seal": seal}), '{"format": "ddp-checkpoint/1"}', "[" * 100_000, "\x00"):
        path.write_text(text)
        lines: list[str] = []
        found = newest_valid(tmp_path, lines.append)
        assert found is not None
        assert (found.step, len(lines)) == (1, 2)
        assert "checkpoint step-000000002 is damaged" in lines[0]


def test_metadata_that_could_not_be_read_back_are_not_saved(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    for metadata in ({"deep": deep}, {"loss": float("nan")}):
        with Checkpointer(tmp_path) as checkpointer, refusing(ValueError):
            checkpointer.save(state_of(1), step=1, epoch=0, metadata=metadata)
    assert find_checkpoints(tmp_path) == []


@pytest.mark.parametrize("text", ['{"step": 1e400}', '{"step": "1"}', '{"step": -1}', "[" * 100_000, "\x00"])
def test_a_pointer_that_points_nowhere_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "best.json").write_text(text)
    assert pointed_step(tmp_path / "best.json") is None


def test_an_old_checkpoint_that_somebody_else_has_removed_is_not_missed(tmp_path: Path) -> None:
    def remove_the_first() -> None:
        # The second is complete then, and what is to be removed has been listed.
        if pointed_step(tmp_path / "latest.json") == 2:
            (tmp_path / "step-000000001.json").unlink(missing_ok=True)

    with Checkpointer(tmp_path, keep_last=1, fence=remove_the_first) as checkpointer:
        for step in (1, 2):
            checkpointer.save(state_of(step), step=step, epoch=0)
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [2]
    assert sweep(tmp_path) == []


def test_a_save_does_without_a_niceness_that_the_system_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    with Checkpointer(tmp_path, asynchronous=True) as checkpointer:
        checkpointer.save(state_of(1), step=1, epoch=0)
    assert len(find_checkpoints(tmp_path)) == 1
