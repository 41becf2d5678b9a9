"""A stale rank 0 that wakes up writes nothing (row 5 of the fault matrix)."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import take_lock
from ddp_core.checkpoint import Checkpointer, Fence, Superseded, find_checkpoints, load
from ddp_core.checkpoint.committing import POINTS
from tests.core.checkpoint.children import state_of, stopped_inside_the_fence, take_many, wait_until_stopped
from tests.core.checkpoint.saved import leftovers, save_steps, saved
from tests.support.processes import ask, start


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

    saved(tmp_path, 10)
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
    assert leftovers(tmp_path) == {"fence.json", "fence.lock"}
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


def is_now(text: str) -> bool:
    written = datetime.datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.UTC)
    return abs((datetime.datetime.now(datetime.UTC) - written).total_seconds()) < 120


def test_times_are_those_of_greenwich(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        with Checkpointer(tmp_path) as checkpointer:
            save_steps(checkpointer, 1)
        Fence.take(tmp_path)
    finally:
        monkeypatch.undo()
        time.tzset()
    content = json.loads((tmp_path / "fence.json").read_text())
    assert is_now(checkpointer.last.written_at)
    assert is_now(content["since"])
    assert content["holder"].startswith(f"process {os.getpid()} on ")
