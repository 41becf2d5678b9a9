"""What only a close look at checkpoints shows: the seal, races with other processes and threads, a refused niceness."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from ddp_core.checkpoint import Checkpointer, find_checkpoints, newest_valid, sweep
from ddp_core.checkpoint.manifest import Damaged, pointed_step, read_manifest
from tests.core.checkpoint.children import state_of
from tests.support.wording import refusing

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
