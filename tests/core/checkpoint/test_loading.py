"""Which checkpoint is found, verified and loaded, and which one is not; what the dead have left is swept."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.checkpoint import (
    Checkpoint,
    Checkpointer,
    best_checkpoint,
    describe,
    find_checkpoints,
    load,
    loading,
    newest_valid,
    read_checkpoint,
    sweep,
    verify,
)
from ddp_core.checkpoint.manifest import encode
from tests.core.checkpoint.children import state_of
from tests.core.checkpoint.saved import is_whole, leftovers, saved
from tests.faults.matrix import record_row
from tests.support.wording import refusing


def test_another_process_can_be_told_which_checkpoint_where_there_is_one(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        assert newest_valid(place) is best_checkpoint(place) is None
        assert find_checkpoints(place) == sweep(place) == []
    Checkpointer(tmp_path).save(state_of(3), step=3, epoch=0)
    chosen = newest_valid(tmp_path)
    for path in (chosen.path, chosen.manifest):
        assert read_checkpoint(path, sha256=chosen.sha256) == chosen
        with refusing():
            read_checkpoint(path, sha256="0" * 64)
    verify(chosen)


def test_every_kind_of_file_that_a_dead_writer_leaves_is_swept(tmp_path: Path) -> None:
    targets = ("latest.json", "best.json", "fence.json", "step-000000009.pt", "step-000000009.json")
    for name in (*targets, "notes.json"):
        (tmp_path / f".{name}.0123456789ab.tmp").touch()
    assert {path.name for path in sweep(tmp_path)} == {f".{name}.0123456789ab.tmp" for name in targets}


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "No locks available"), FileNotFoundError()])
def test_what_cannot_be_swept_is_said_unless_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def fail(descriptor: int) -> bool:
        raise error

    (tmp_path / "step-000000009.pt").touch()
    monkeypatch.setattr(loading, "take_lock", fail)
    said: list[str] = []
    assert sweep(tmp_path, said.append) == []
    assert said == [f"warning: cannot sweep {tmp_path}/step-000000009.pt: No locks available"] * (
        error.errno is not None
    )


def _edited(checkpoint: Checkpoint, before: str, after: str) -> None:
    checkpoint.manifest.write_text(checkpoint.manifest.read_text().replace(before, after))


def _with(fields: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Write the manifest with other fields, and with the seal that fits them."""
    content = {name: value for name, value in json.loads(checkpoint.manifest.read_text()).items() if name != "seal"}
    sealed = json.dumps(content | fields, sort_keys=True, separators=(",", ":")).encode()
    seal = hashlib.sha256(sealed).hexdigest()
    checkpoint.manifest.write_text(json.dumps(content | fields | {"seal": seal}))


OTHER_FIELDS: list[dict[str, Any]] = [
    *({"format": "ddp-checkpoint/9"}, {"step": [30]}, {"step": 2.0}, {"file": 5}, {"sha256": 7}, {"shapes": []}),
    *({"parts": [7]}, {"parts": 7}, {"more": 1}, {"metric": float("nan")}),
]
MANIFEST_DAMAGES: dict[str, Callable[[Checkpoint], Any]] = {
    "empty manifest": lambda each: os.truncate(each.manifest, 0),
    "half a manifest": lambda each: os.truncate(each.manifest, each.manifest.stat().st_size // 2),
    "a later format": lambda each: _edited(each, "ddp-checkpoint/1", "ddp-checkpoint/9"),
    "edited manifest": lambda each: _edited(each, '"epoch": 0', '"epoch": 1'),
    "deep manifest": lambda each: each.manifest.write_text("[" * 100_000),
    "manifest of one NUL": lambda each: each.manifest.write_text("\x00"),
    "manifest of the format alone": lambda each: each.manifest.write_text('{"format": "ddp-checkpoint/1"}'),
    **{str(fields): functools.partial(_with, fields) for fields in OTHER_FIELDS},
}
DAMAGES: dict[str, Callable[[Checkpoint], Any]] = MANIFEST_DAMAGES | {
    "truncated": lambda each: os.truncate(each.path, each.bytes // 2),
    "empty": lambda each: os.truncate(each.path, 0),
    "lost": lambda each: each.path.unlink(),
    "grown": lambda each: each.path.write_bytes(each.path.read_bytes() + b"\0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path: Path, damage: str) -> None:
    DAMAGES[damage](saved(tmp_path, 10, 20)[0])
    lines: list[str] = []
    newest = newest_valid(tmp_path, lines.append)
    assert newest.step == 10
    assert is_whole(newest)
    assert [line.startswith("warning:") for line in lines] == [True, True]
    assert "step-000000020" in lines[0]
    assert lines[1].endswith("step 10")
    with pytest.raises(UserError, match="no usable checkpoint at") as caught:
        read_checkpoint(tmp_path / "step-000000020.json")
    assert caught.value.exit_code == ExitCode.NO_CHECKPOINT
    Checkpointer(tmp_path, keep_last=2).save(state_of(40), step=40, epoch=0)
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [40, 10], "it is none of the two kept"
    assert leftovers(tmp_path) == set()
    for checkpoint in find_checkpoints(tmp_path):
        DAMAGES[damage](checkpoint)
    with pytest.raises(UserError, match=r"2 found, all damaged \(the newest: .*step-000000040[^\n]*$") as caught:
        newest_valid(tmp_path)
    assert caught.value.exit_code == ExitCode.NO_CHECKPOINT


@pytest.mark.parametrize("damage", [*MANIFEST_DAMAGES, "a folder in its place"])
def test_the_data_of_a_manifest_that_cannot_be_read_is_no_leftover(tmp_path: Path, damage: str) -> None:
    [checkpoint] = saved(tmp_path, 10)
    if damage in MANIFEST_DAMAGES:
        MANIFEST_DAMAGES[damage](checkpoint)
    else:
        checkpoint.manifest.unlink()
        checkpoint.manifest.mkdir()  # not even root can read it
    assert sweep(tmp_path) == []
    assert checkpoint.path.exists()


def test_data_that_the_disk_does_not_give_back_are_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest, older = saved(tmp_path, 10, 20)

    def digest(data: Any, name: str) -> Any:
        if data.name == str(newest.path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return file_digest(data, name)

    file_digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", digest)
    assert newest_valid(tmp_path) == older


def test_any_flipped_bit_of_the_data_is_found_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, older = saved(tmp_path, 10, 20)
    whole = newest.path.read_bytes()
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a damaged file was loaded"))
    positions = [0, len(whole) - 1, *random.Random(1).sample(range(len(whole)), 20)]
    for position in positions:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        newest.path.write_bytes(damaged)
        assert newest_valid(tmp_path) == older
        with pytest.raises(UserError, match="SHA-256") as caught:
            load(newest)
        assert caught.value.exit_code == ExitCode.NO_CHECKPOINT
    newest.path.write_bytes(whole)
    assert newest_valid(tmp_path) == newest


def test_the_checkpoint_of_another_model_or_experiment_is_refused_with_the_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [checkpoint] = saved(tmp_path, 10)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a tensor was loaded"))
    other = {"model": {"weight": torch.ones(7, dtype=torch.float64), "head": torch.ones(2)}}
    with refusing():
        load(checkpoint, expect=describe(other))
    with refusing() as caught:
        load(checkpoint, expect=describe(other), only=["model"])
    record_row(12, f"another model: 3, '{str(caught.value).partition(': ')[2][:90]} …', no tensor loaded")
    many = {"model": {f"layer{number}": torch.ones(1) for number in range(9)}}
    with refusing():
        load(checkpoint, expect=describe(many))
    for expected in ({"experiment": "xyz"}, {"absent": 1}):
        with refusing():
            load(checkpoint, expect_metadata=expected)


class _Attack:
    """An object that makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def _commit(checkpoint: Checkpoint) -> Checkpoint:
    """Write a manifest that fits the data file as it is now."""
    data = checkpoint.path.read_bytes()
    checkpoint = replace(checkpoint, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    checkpoint.manifest.write_bytes(encode(checkpoint))
    return checkpoint


@pytest.mark.parametrize("packing", ["zip", "legacy", "pickle"])
def test_a_malicious_pickle_with_a_valid_manifest_is_refused_not_run(tmp_path: Path, packing: str) -> None:
    directory, marker = tmp_path / "checkpoints", tmp_path / "ran"
    [checkpoint] = saved(directory, 10)
    attack = {"model": torch.ones(3), "attack": _Attack(marker)}
    if packing == "pickle":
        checkpoint.path.write_bytes(pickle.dumps({"attack": _Attack(marker)}, protocol=2))
    else:
        torch.save(attack, checkpoint.path, _use_new_zipfile_serialization=packing == "zip")
    _commit(checkpoint)
    newest = newest_valid(directory)
    assert newest is not None
    with refusing():
        load(newest)
    assert not marker.exists()
    torch.load(checkpoint.path, weights_only=False) if packing != "pickle" else pickle.loads(
        checkpoint.path.read_bytes()
    )
    assert marker.exists(), "the attack would not have worked anyway"
    record_row(13, "refused before unpickling, 3")


@pytest.mark.parametrize("content", [b"not a checkpoint", b"PK\x03\x04", b""])
def test_rubbish_with_a_valid_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    [checkpoint] = saved(tmp_path, 10)
    checkpoint.path.write_bytes(content)
    with pytest.raises(UserError, match=r"^(?!.*weights_only).*refused[^\n]*$") as caught:
        load(_commit(checkpoint))
    assert caught.value.exit_code == ExitCode.NO_CHECKPOINT


def test_data_that_does_not_hold_what_its_manifest_says_is_refused(tmp_path: Path) -> None:
    [checkpoint] = saved(tmp_path, 10)
    torch.save({"model": torch.ones(3)}, checkpoint.path)
    with refusing():
        load(_commit(checkpoint))
