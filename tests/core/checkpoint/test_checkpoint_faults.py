"""Checkpoints with faults: kills, damage, foreign files, full disks, and writers that wake up too late.

The rows named below are those of the fault matrix, tests/faults/matrix.py.
"""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import take_lock
from ddp_core.checkpoint import (
    Checkpoint,
    Checkpointer,
    Fence,
    Superseded,
    describe,
    find_checkpoints,
    load,
    newest_valid,
    read_checkpoint,
    sweep,
)
from ddp_core.checkpoint.data_file import POINTS
from ddp_core.checkpoint.manifest import encode
from tests.core.checkpoint.children import (
    killed_at,
    save_under_a_file_limit,
    state_of,
    stopped_inside_the_fence,
    take_many,
    wait_until_stopped,
)
from tests.core.checkpoint.test_checkpoint import same
from tests.faults.matrix import record_row
from tests.support.mounts import tmpfs
from tests.support.processes import HANG, ask, start
from tests.support.wording import refusing


def _save(directory: Path, *steps: int) -> list[Checkpoint]:
    """Save checkpoints of these steps; return them, the newest first."""
    checkpointer = Checkpointer(directory, keep_last=100)
    for step in steps:
        checkpointer.save(state_of(step), step=step, epoch=0, metadata={"experiment": "abc"})
    return find_checkpoints(directory)


def _is_whole(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint loads, and every number in it belongs to its step."""
    return same(load(checkpoint), state_of(checkpoint.step))


def _leftovers(directory: Path) -> set[str]:
    committed = {name for each in find_checkpoints(directory) for name in (each.file, each.manifest.name)}
    return {path.name for path in directory.iterdir()} - committed - {"latest.json", "best.json"}


# Row 9: SIGKILL at every point between the opening of the file and the last rename.


@pytest.mark.parametrize(
    ("points", "asynchronous", "before"),
    [
        pytest.param(
            ["data renamed", "manifest renamed", "old manifest removed"], False, [10, 20], id="around the commit"
        ),
        pytest.param([POINTS[1], *POINTS[4:9]], True, [], id="the very first save"),
        pytest.param(POINTS, False, [10, 20], marks=pytest.mark.slow, id="now"),
        pytest.param(POINTS, True, [10, 20], marks=pytest.mark.slow, id="aside"),
    ],
)
def test_a_kill_at_any_point_of_a_save_leaves_the_newest_complete_checkpoint(
    tmp_path: Path, points: Sequence[str], asynchronous: bool, before: list[int]
) -> None:
    folders = {point: tmp_path / point.replace(" ", "-") for point in points}
    children = [start(killed_at, folder, point, asynchronous, before, 30) for point, folder in folders.items()]
    for (point, directory), child in zip(folders.items(), children, strict=True):
        child.join(HANG)
        assert child.exitcode == -signal.SIGKILL, f"{point}: the child ended with {child.exitcode}"
        committed = POINTS.index(point) >= POINTS.index("manifest renamed")
        newest, steps = newest_valid(directory), [*before, *([30] if committed else [])]
        assert (newest and newest.step) == (steps[-1] if steps else None), point
        assert newest is None or _is_whole(newest), point
        swept = [path.name for path in sweep(directory)]
        assert point != "old manifest removed" or swept == ["step-000000010.pt"], "the data go after their manifest"
        assert _leftovers(directory) == set(), point
        with Checkpointer(directory) as checkpointer:
            checkpointer.save(state_of(40), step=40, epoch=0)
        assert _is_whole(newest_valid(directory)), point
    if points == POINTS:
        how = f"saved {'aside' if asynchronous else 'at once'}: killed at each of {len(POINTS)} points"
        record_row(9, f"{how}, the newest complete one loads, nothing is left")


# Rows 10 and 11: damaged files.


def _edited(checkpoint: Checkpoint, before: str, after: str) -> None:
    checkpoint.manifest.write_text(checkpoint.manifest.read_text().replace(before, after))


MANIFEST_DAMAGES: dict[str, Callable[[Checkpoint], Any]] = {
    "empty manifest": lambda each: os.truncate(each.manifest, 0),
    "half a manifest": lambda each: os.truncate(each.manifest, each.manifest.stat().st_size // 2),
    "a later format": lambda each: _edited(each, "ddp-checkpoint/1", "ddp-checkpoint/9"),
    "edited manifest": lambda each: _edited(each, '"epoch": 0', '"epoch": 1'),
}
DAMAGES: dict[str, Callable[[Checkpoint], Any]] = MANIFEST_DAMAGES | {
    "truncated": lambda each: os.truncate(each.path, each.bytes // 2),
    "empty": lambda each: os.truncate(each.path, 0),
    "lost": lambda each: each.path.unlink(),
    "grown": lambda each: each.path.write_bytes(each.path.read_bytes() + b"\0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path: Path, damage: str) -> None:
    DAMAGES[damage](_save(tmp_path, 10, 20)[0])
    lines: list[str] = []
    newest = newest_valid(tmp_path, lines.append)
    assert newest.step == 10
    assert _is_whole(newest)
    assert [line.startswith("warning:") for line in lines] == [True, True]
    assert "step-000000020" in lines[0]
    assert lines[1].endswith("step 10")
    with pytest.raises(UserError, match="no usable checkpoint at") as caught:
        read_checkpoint(tmp_path / "step-000000020.json")
    assert caught.value.exit_code == ExitCode.NO_CHECKPOINT
    Checkpointer(tmp_path, keep_last=2).save(state_of(40), step=40, epoch=0)
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [40, 10], "it is none of the two kept"
    assert _leftovers(tmp_path) == set()
    for checkpoint in find_checkpoints(tmp_path):
        DAMAGES[damage](checkpoint)
    with pytest.raises(UserError, match=r"2 found, all damaged \(the newest: .*step-000000040[^\n]*$") as caught:
        newest_valid(tmp_path)
    assert caught.value.exit_code == ExitCode.NO_CHECKPOINT


@pytest.mark.parametrize("damage", [*MANIFEST_DAMAGES, "a folder in its place"])
def test_the_data_of_a_manifest_that_cannot_be_read_is_no_leftover(tmp_path: Path, damage: str) -> None:
    [checkpoint] = _save(tmp_path, 10)
    if damage in MANIFEST_DAMAGES:
        MANIFEST_DAMAGES[damage](checkpoint)
    else:
        checkpoint.manifest.unlink()
        checkpoint.manifest.mkdir()  # not even root can read it
    assert sweep(tmp_path) == []
    assert checkpoint.path.exists()


def test_data_that_the_disk_does_not_give_back_are_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest, older = _save(tmp_path, 10, 20)

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
    newest, older = _save(tmp_path, 10, 20)
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


def test_no_flipped_bit_of_a_manifest_is_believed(tmp_path: Path) -> None:
    newest, older = _save(tmp_path, 10, 20)
    whole = newest.manifest.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 7
        newest.manifest.write_bytes(damaged)
        # A flip in white space may change nothing. The checkpoint that is read must then be the one that was written.
        assert find_checkpoints(tmp_path)[0] in (older, newest), f"position {position} of {whole!r}"


# Rows 12 and 13: the files of others.


def test_the_checkpoint_of_another_model_or_experiment_is_refused_with_the_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [checkpoint] = _save(tmp_path, 10)
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
    [checkpoint] = _save(directory, 10)
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
    [checkpoint] = _save(tmp_path, 10)
    checkpoint.path.write_bytes(content)
    with pytest.raises(UserError, match=r"^(?!.*weights_only).*refused[^\n]*$") as caught:
        load(_commit(checkpoint))
    assert caught.value.exit_code == ExitCode.NO_CHECKPOINT


def test_data_that_does_not_hold_what_its_manifest_says_is_refused(tmp_path: Path) -> None:
    [checkpoint] = _save(tmp_path, 10)
    torch.save({"model": torch.ones(3)}, checkpoint.path)
    with refusing():
        load(_commit(checkpoint))


def test_a_manifest_cannot_lead_out_of_its_directory(tmp_path: Path) -> None:
    [checkpoint] = _save(tmp_path / "checkpoints", 10)
    checkpoint.path.rename(tmp_path / checkpoint.file)
    checkpoint.manifest.write_bytes(encode(replace(checkpoint, file=f"../{checkpoint.file}")))
    assert find_checkpoints(tmp_path / "checkpoints") == []


# Rows 8 and 22: no room on the disk, no permission to write.


@pytest.mark.parametrize("asynchronous", [False, True], ids=["now", "aside"])
@pytest.mark.parametrize("limit", [100_000, 1_000])
def test_a_file_limit_is_a_full_disk_and_the_checkpoint_before_loads(
    tmp_path: Path, limit: int, asynchronous: bool
) -> None:
    _save(tmp_path, 10)
    where, code, message = ask(save_under_a_file_limit, tmp_path, limit, asynchronous)
    assert (where, code) == ("check" if asynchronous else "save", ExitCode.RESOURCES)
    assert "file too large (EFBIG): needs 307.1 kB" in message
    assert f"`ulimit -f` allows {'100.0 kB' if limit == 100_000 else '1.0 kB'} for {tmp_path}" in message
    assert _leftovers(tmp_path) == set()
    assert find_checkpoints(tmp_path)[0].step == 10
    assert _is_whole(newest_valid(tmp_path))


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

        _save(directory, 10)
        for options in ({"at": fill}, {}):
            with pytest.raises(UserError, match=r"disk full: needs 307\.1 kB, has \d+ bytes for .*/small/") as caught:
                Checkpointer(directory, **options).save(state_of(20), step=20, epoch=0)
            assert caught.value.exit_code == ExitCode.RESOURCES
            assert _leftovers(directory) == {"filler"}
            assert _is_whole(newest_valid(directory))
        filler.unlink()
        Checkpointer(directory).save(state_of(20), step=20, epoch=0)
        assert find_checkpoints(directory)[0].step == 20


def test_a_directory_that_cannot_be_made_or_written_to_is_met_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for directory in (tmp_path / "file", tmp_path / "file" / "checkpoints"):
        with refusing():
            Checkpointer(directory)
        with refusing():
            Fence.take(directory)
    with tmpfs(tmp_path / "fixed", "ro") as directory, refusing():
        Checkpointer(directory)


# Row 5: a stale rank 0 that wakes up writes nothing.


def _contents(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["now", "aside"])
@pytest.mark.parametrize("point", POINTS[: POINTS.index("old manifest removed")])
def test_a_writer_that_is_superseded_at_any_point_changes_nothing_afterwards(
    tmp_path: Path, point: str, asynchronous: bool
) -> None:
    """The successor saves the same step, so what the stale writer would write has the same names."""
    before: dict[str, str] = {}

    def supersede(reached: str) -> None:
        if reached == point:
            successor = Checkpointer(tmp_path, keep_last=9, fence=Fence.take(tmp_path))
            successor.save(state_of(30, floats=7), step=30, epoch=1, metric=0.5, best=True)
            before.update(_contents(tmp_path))

    _save(tmp_path, 10)
    how: dict[str, Any] = {"keep_last": 1, "fence": Fence.take(tmp_path), "at": supersede}

    def save() -> None:
        with Checkpointer(tmp_path, asynchronous=asynchronous, **how) as stale:
            stale.save(state_of(30, floats=9), step=30, epoch=0, best=True)

    with pytest.raises(Superseded):
        save()
    after = _contents(tmp_path)
    gone = before.keys() - after.keys()
    assert all(name.endswith(".tmp") or name == "step-000000030.pt" for name in gone), "only its own leftovers go"
    assert after == {name: digest for name, digest in before.items() if name not in gone}
    assert _leftovers(tmp_path) == {"fence.json", "fence.lock"}
    assert load(find_checkpoints(tmp_path)[0])["model"]["weight"].tolist() == [30.0] * 7


def test_a_stale_writer_does_not_even_start(tmp_path: Path) -> None:
    first = Checkpointer(tmp_path, fence=Fence.take(tmp_path), asynchronous=True)
    first.save(state_of(10), step=10, epoch=0)
    first.wait()
    newer = Fence.take(tmp_path)
    with pytest.raises(Superseded, match="token 2 ") as caught:
        first.save(state_of(20), step=20, epoch=0)
    assert caught.value.exit_code == ExitCode.PEERS_LOST
    newer.check()
    assert [each.step for each in find_checkpoints(tmp_path)] == [10]


def test_tokens_only_grow_and_no_two_are_equal(tmp_path: Path) -> None:
    here = take_many(tmp_path, 5)
    there = ask(take_many, tmp_path, 20)
    assert here == [1, 2, 3, 4, 5]
    assert there == list(range(6, 26))


def test_a_writer_stopped_inside_the_critical_section_does_not_hold_up_its_successor(tmp_path: Path) -> None:
    stale = start(stopped_inside_the_fence, tmp_path)
    try:
        wait_until_stopped(stale)
        fence = Fence.take(tmp_path, patience=0.3)
        assert fence.token == 2
        fence.check()
    finally:
        stale.kill()
        stale.join()


def test_a_lock_whose_file_was_replaced_meanwhile_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence, lock, replacing = Fence.take(tmp_path), tmp_path / "fence.lock", iter([True])

    def take(descriptor: int, *, patience: float) -> bool:
        taken = take_lock(descriptor, patience=patience)
        if next(replacing, False):
            lock.unlink()
            lock.touch()
        return taken

    monkeypatch.setattr("ddp_core.checkpoint.fence.take_lock", take)
    with fence.holding(), lock.open("rb") as another:
        assert not take_lock(another.fileno()), "another process could take it, too"


def test_a_damaged_or_lost_fence_is_a_message(tmp_path: Path) -> None:
    fence = Fence.take(tmp_path)
    (tmp_path / "fence.json").unlink()
    with pytest.raises(Superseded, match="is gone"):
        fence.check()
    (tmp_path / "fence.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        Fence.take(tmp_path)
