"""Checkpoints and a power cut at any moment: whatever the disk kept, the newest complete checkpoint is there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ddp_core.base.errors import UserError
from ddp_core.base.files import target_of
from ddp_core.checkpoint import Checkpointer, Fence, best_checkpoint, load, newest_valid, read_checkpoint
from tests.core.checkpoint.power_cut import TracedDisk

# Steps, and whether each is the best. One is saved twice; in the end all but the newest and the best are removed.
SAVES = ((10, True), (20, False), (20, False), (30, True), (40, False))


def _save_all(disk: TracedDisk, asynchronous: bool, saves: Sequence[tuple[int, bool]] = SAVES) -> None:
    with disk.recording(), Checkpointer(disk.folder, keep_last=1, asynchronous=asynchronous) as checkpointer:
        for number, (step, best) in enumerate(saves):
            disk.note((saves[:number], saves[number]))
            checkpointer.save({"number": torch.tensor(float(step))}, step=step, epoch=0, best=best)
            checkpointer.wait()
        disk.note((saves, None))


class _Reader:
    """Puts what a disk kept into a real folder, and asks for checkpoints there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._answers: dict[frozenset[tuple[str, bytes]], tuple[int | None, int | None]] = {}

    def steps(self, content: dict[str, bytes]) -> tuple[int | None, int | None]:
        """The steps of the newest and of the best checkpoint. Raises UserError for a pointer to what is not there."""
        # A half-written file under a temporary name is passed over, whatever is in it.
        key = frozenset((name, data) for name, data in content.items() if target_of(name) is None)
        if key not in self._answers:
            folder = self._folder / str(len(self._answers))
            folder.mkdir()
            for name, data in content.items():
                (folder / name).write_bytes(data)
            self._answers[key] = self._ask(folder)
        return self._answers[key]

    def _ask(self, folder: Path) -> tuple[int | None, int | None]:
        found = []
        if (folder / "latest.json").exists():
            read_checkpoint(folder / json.loads((folder / "latest.json").read_bytes())["manifest"])
        for checkpoint in (newest_valid(folder), best_checkpoint(folder)):
            assert checkpoint is None or load(checkpoint)["number"].item() == checkpoint.step
            found.append(None if checkpoint is None else checkpoint.step)
        return found[0], found[1]


def _broken_promise(disk: TracedDisk, folder: Path) -> str | None:
    """What a power cut at the first unsafe moment could leave; None where a power cut does no harm at any moment."""
    reader = _Reader(folder)
    for promise, contents in disk.moments():
        saved, begun = promise or ((), None)
        newest = {saved[-1][0] if saved else None} | ({begun[0]} if begun else set())
        bests = [step for step, best in saved if best]
        best = {bests[-1] if bests else None} | ({begun[0]} if begun and begun[1] else set())
        for content in contents:
            try:
                found = reader.steps(content)
            except UserError as error:
                return str(error)
            if found[0] not in newest or found[1] not in best:
                return f"steps {found} are newest and best, where {newest} and {best} are promised"
    return None


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A folder to be recorded, and one for what is left of it after a power cut."""
    for name in ("disk", "left"):
        (tmp_path / name).mkdir()
    return tmp_path / "disk", tmp_path / "left"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["now", "aside"])
def test_the_newest_complete_checkpoint_and_the_best_one_are_left(
    folders: tuple[Path, Path], asynchronous: bool
) -> None:
    disk = TracedDisk(folders[0])
    _save_all(disk, asynchronous)
    assert _broken_promise(disk, folders[1]) is None


@pytest.mark.parametrize("ignored", ["flushes_files", "flushes_names"])
def test_a_disk_that_ignores_a_flush_loses_a_checkpoint(folders: tuple[Path, Path], ignored: str) -> None:
    """The negative control: what the test above promises is what the flushes bring about."""
    disk = TracedDisk(folders[0], **{ignored: False})
    _save_all(disk, False, SAVES[:1])
    assert _broken_promise(disk, folders[1]) is not None


def test_no_token_of_a_fence_is_given_twice(folders: tuple[Path, Path]) -> None:
    disk = TracedDisk(folders[0])
    with disk.recording():
        for _ in range(2):
            disk.note(Fence.take(disk.folder).token)
    number = 0
    for given, contents in disk.moments():
        for content in contents:
            number += 1
            left = folders[1] / str(number)
            left.mkdir()
            for name, data in content.items():
                (left / name).write_bytes(data)
            assert Fence.take(left).token > (given or 0)
