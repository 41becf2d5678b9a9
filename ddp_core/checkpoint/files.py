"""Files that are either there, whole and on the disk, or not there at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import resource
import secrets
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from ddp_core.errors import ExitCode, UserError

POINTS = (
    "data opened",
    "data partly written",
    "data written",
    "data synced",
    "data renamed",
    "manifest opened",
    "manifest written",
    "manifest synced",
    "manifest renamed",
    "directory synced",
    "latest synced",
    "latest renamed",
    "best synced",
    "best renamed",
    "old manifest removed",
    "old data removed",
)
"""Every step of a save, in order. A `Checkpointer(at=…)` calls `at(point)` right after each; tests die there."""

At = Callable[[str], None]

_TEMPORARY = re.compile(
    r"\.(?:step-\d{9,}(?:-\d+)?\.pt|step-\d{9,}\.json|latest\.json|best\.json|fence\.json)\.[0-9a-f]{12}\.tmp"
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_temporary(name: str) -> bool:
    """Whether a file name is one that `NewFile` gives to a temporary file of a checkpoint directory."""
    return _TEMPORARY.fullmatch(name) is not None


def human_bytes(count: float) -> str:
    """A count of bytes with a decimal unit, e.g. "94.1 MB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def free_bytes(directory: Path) -> int:
    """Bytes that an unprivileged process can still write on the file system of `directory`."""
    usage = os.statvfs(directory)
    return usage.f_bavail * usage.f_frsize


def disk_full(path: Path, needed: int, available: int) -> UserError:
    """The error for a disk without room for `path`."""
    return UserError(
        f"disk full: needs {human_bytes(needed)}, has {human_bytes(available)} for {path}; free some space or keep "
        "fewer checkpoints, then start again: the run continues from its newest checkpoint",
        ExitCode.RESOURCES,
    )


def write_error(error: OSError, path: Path, needed: int = 0) -> UserError:
    """The user's version of an OSError met while writing `path`, which needed `needed` bytes in all."""
    if error.errno in _FULL:
        available = 0
        with contextlib.suppress(OSError):
            available = free_bytes(path.parent)
        if error.errno == errno.EFBIG:
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            available = min(available, limit) if limit != resource.RLIM_INFINITY else available
        return disk_full(path, needed, available)
    return UserError(
        f"cannot write {path}: {error.strerror or error}; give an output directory that this user may write to",
        ExitCode.RESOURCES,
    )


def sync_directory(directory: Path) -> None:
    """Make the renames and removals in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Take the file's exclusive flock without waiting; whether it was free."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class NewFile:
    """A file under a unique temporary name beside `target`, hashed while it is written; `rename` makes it `target`.

    Leaving the context without `rename` removes it. It is flocked while open, so that `sweep` can tell a live writer's
    file from a dead one's without knowing processes (which is impossible between containers).

    The first OSError of a `write` is kept, and raised by `sync`: `torch.save` would turn it into a message about
    "unexpected pos".
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.written = 0
        self.on_first_write: Callable[[], None] | None = None
        self._digest = hashlib.sha256()
        self._error: OSError | None = None
        self._renamed = False
        while True:
            self.temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
            self._descriptor = os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if os.fstat(self._descriptor).st_nlink:
                break
            os.close(self._descriptor)  # swept between open and flock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._renamed:
            with contextlib.suppress(OSError):
                self.temporary.unlink()
        os.close(self._descriptor)

    def write(self, data: bytes | memoryview) -> int:
        """Append `data`; after a first OSError, which is kept, nothing is written any more."""
        view = memoryview(data).cast("B")
        if self._error is None:
            self._digest.update(view)
            try:
                done = 0
                while done < len(view):
                    done += os.write(self._descriptor, view[done:])
            except OSError as error:
                self._error = error
            self.written += len(view)
            if self.on_first_write is not None:
                self.on_first_write()
                self.on_first_write = None
        return len(view)

    def flush(self) -> None:
        """Nothing is buffered here; `torch.save` asks for the method."""

    def raise_write_error(self) -> None:
        """Raise the OSError that a `write` met."""
        if self._error is not None:
            raise self._error

    def sync(self) -> None:
        """Raise what `write` met, then wait until the bytes are on the disk."""
        self.raise_write_error()
        os.fsync(self._descriptor)

    def rename(self) -> None:
        """Give the file its real name; it stays locked until the context ends."""
        self.temporary.rename(self.target)
        self._renamed = True

    @property
    def sha256(self) -> str:
        """Hexadecimal digest of everything written so far."""
        return self._digest.hexdigest()


def replace_file(target: Path, content: bytes) -> None:
    """Write `target` anew: temporary file, fsync, rename; raises OSError."""
    with NewFile(target) as new:
        new.write(content)
        new.sync()
        new.rename()
    sync_directory(target.parent)
