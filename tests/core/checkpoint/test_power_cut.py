"""Checkpoints and a power cut at any moment: whatever the disk kept, the newest complete checkpoint is there.

A system keeps written bytes and changed names in memory, and writes them to the disk when it likes. Only a flush
(fsync) of a file makes the bytes safe that were written to it before, and only a flush of the folder makes the names
safe that were given or removed before. Everything else may be lost or kept, each by itself, and in any order
(T. S. Pillai et al., "All file systems are not created equal", OSDI 2014). The folder itself is taken to be safe.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_core.base.errors import UserError
from ddp_core.base.files import target_of
from ddp_core.checkpoint import Checkpointer, Fence, best_checkpoint, load, newest_valid, read_checkpoint

Names = dict[str, "_File | None"]
"""What one operation on a folder changes: the file that a name stands for from then on, None for a removed name."""


@dataclass(eq=False)
class _File:
    """The bytes of a file, and how many of them are safe."""

    content: bytes = b""
    flushed: int = 0

    def after_power_cut(self) -> set[bytes]:
        """All unsafe bytes are there, or none of them, or only the file's new length has reached the disk."""
        safe = self.content[: self.flushed]
        return {self.content, safe, safe.ljust(len(self.content), b"\0")}


@dataclass
class TracedDisk:
    """A folder whose files are written, renamed, removed and flushed inside `recording()`, by any thread."""

    folder: Path
    flushes_files: bool = True
    flushes_names: bool = True
    """Where one of these is False, the disk reports such flushes as done without doing them."""
    _operations: list[Callable[[_Replay], None]] = field(default_factory=list)
    _names: dict[str, _File] = field(default_factory=dict)
    _open: dict[int, _File | None] = field(default_factory=dict)

    def note(self, promise: Any) -> None:
        """From here on `promise` holds."""
        self._operations.append(lambda replay: setattr(replay, "promise", promise))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what this process does in the folder, by way of the functions of `os`."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("open", "write", "fsync", "close", "rename", "unlink"):
                patch.setattr(os, name, self._recorded(getattr(os, name), getattr(self, f"_{name}_seen")))
            yield

    def moments(self) -> Iterator[tuple[Any, list[dict[str, bytes]]]]:
        """After each operation: the promise that holds, and each content that the folder may have after a power cut."""
        replay = _Replay()
        yield replay.promise, replay.after_power_cut()
        for operation in self._operations:
            operation(replay)
            yield replay.promise, replay.after_power_cut()

    def _recorded(self, function: Callable[..., Any], seen: Callable[..., None]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            seen(result, *_absolute(arguments, named))
            return result

        return call

    def _open_seen(self, descriptor: int, path: Any, flags: int, *_: Any) -> None:
        if Path(path) == self.folder:
            self._open[descriptor] = None
        elif Path(path).parent == self.folder:
            name = Path(path).name
            if name not in self._names:
                assert flags & os.O_CREAT
                self._change({name: _File()})
            self._open[descriptor] = self._names[name]

    def _write_seen(self, written: int, descriptor: int, data: bytes | memoryview) -> None:
        file, new = self._open.get(descriptor), bytes(data[:written])
        if file is not None:
            self._operations.append(lambda replay: setattr(file, "content", file.content + new))

    def _fsync_seen(self, _: None, descriptor: int) -> None:
        if descriptor not in self._open:
            return
        file = self._open[descriptor]
        if file is None and self.flushes_names:
            self._operations.append(_Replay.flush_names)
        elif file is not None and self.flushes_files:
            self._operations.append(lambda replay: setattr(file, "flushed", len(file.content)))

    def _close_seen(self, _: None, descriptor: int) -> None:
        self._open.pop(descriptor, None)

    def _rename_seen(self, _: None, old: Any, new: Any) -> None:
        if Path(old).parent == self.folder:
            self._change({Path(old).name: None, Path(new).name: self._names[Path(old).name]})

    def _unlink_seen(self, _: None, path: Any, **__: Any) -> None:
        if Path(path).parent == self.folder:
            self._change({Path(path).name: None})

    def _change(self, names: Names) -> None:
        _apply(names, self._names)
        self._operations.append(lambda replay: replay.unsafe.append(names))


def _absolute(arguments: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    """The arguments, in which a name in a folder that is given by its descriptor has become a path."""
    folders = [named.get(name) for name in ("dir_fd", "src_dir_fd", "dst_dir_fd")]
    one, source, target = (None if each is None else Path(f"/proc/self/fd/{each}").readlink() for each in folders)
    found = list(arguments)
    for place, folder in ((0, one or source), (1, target)):
        if folder is not None:
            found[place] = folder / found[place]
    return found


def _apply(names: Names, to: dict[str, _File]) -> None:
    for name, file in names.items():
        if file is None:
            to.pop(name, None)
        else:
            to[name] = file


@dataclass
class _Replay:
    """The disk, as far as the operations have been replayed."""

    safe: dict[str, _File] = field(default_factory=dict)
    unsafe: list[Names] = field(default_factory=list)
    """Changes of names that no flush has made safe, each of which may be lost."""
    promise: Any = None

    def flush_names(self) -> None:
        for names in self.unsafe:
            _apply(names, self.safe)
        self.unsafe.clear()

    def after_power_cut(self) -> list[dict[str, bytes]]:
        found = []
        for kept in itertools.product((False, True), repeat=len(self.unsafe)):
            names = dict(self.safe)
            for change in itertools.compress(self.unsafe, kept):
                _apply(change, names)
            contents = [file.after_power_cut() for file in names.values()]
            found += [dict(zip(names, choice, strict=True)) for choice in itertools.product(*contents)]
        return found


# Steps, and whether each is the best. One is saved twice; in the end all but the newest and the best are removed.
SAVES = ((10, True), (20, False), (20, False), (30, True), (40, False))


def _save_all(disk: TracedDisk, asynchronous: bool, saves: Sequence[tuple[int, bool]] = SAVES) -> None:
    with disk.recording(), Checkpointer(disk.folder, keep_last=1, asynchronous=asynchronous) as checkpointer:
        for number, (step, best) in enumerate(saves):
            disk.note((saves[:number], saves[number]))
            checkpointer.save({"number": torch.tensor(float(step))}, step=step, epoch=0, best=best)
            checkpointer.wait()
        disk.note((saves, None))


def _written(folder: Path, content: dict[str, bytes]) -> None:
    folder.mkdir()
    for name, data in content.items():
        (folder / name).write_bytes(data)


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
            _written(folder, content)
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
    contents = ((given, content) for given, contents in disk.moments() for content in contents)
    for number, (given, content) in enumerate(contents):
        _written(folders[1] / str(number), content)
        assert Fence.take(folders[1] / str(number)).token > (given or 0)
