"""What a disk may hold after a power cut: the operations on a folder, recorded, and cut off at any moment.

A system keeps written bytes and changed names in memory, and writes them to the disk when it likes. Only a flush
(fsync) of a file makes the bytes safe that were written to it before, and only a flush of the folder makes the names
safe that were given or removed before. Everything else may be lost or kept, each by itself, and in any order
(T. S. Pillai et al., "All file systems are not created equal", OSDI 2014). The folder itself is taken to be safe.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

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
