"""The data file of a checkpoint while it is written, the points of a save, and the errors of a failed write."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import resource
from collections.abc import Callable
from pathlib import Path

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import NewFile

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
"""The points of a save, in order. A `Checkpointer(at=…)` calls `at(point)` right after each; tests kill it there."""

POINTS_OF_PARTS = ("parts reported", "outcome told")
"""Two more points where several ranks save together: one after "data renamed", and the last of all."""

At = Callable[[str], None]
"""Called with the name of a point."""

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
    """The error for the user, with its cause and a way out, after an OSError of writing `path`, of `needed` bytes."""
    if error.errno in _DISK_FULL:
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


class DataFile(NewFile):
    """A NewFile that is hashed while `torch.save` writes into it.

    The first OSError of a `write` is kept for `raise_write_error`, because `torch.save` would replace it by a message
    about "unexpected pos".
    """

    def __init__(self, target: Path) -> None:
        super().__init__(target)
        self.written = 0
        self.on_first_write: Callable[[], None] | None = None
        self._digest = hashlib.sha256()
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Append `data`, unless a `write` has failed before; return its length in bytes."""
        view = memoryview(data).cast("B")
        if self._error is None:
            self._digest.update(view)
            try:
                super().write(view)
            except OSError as error:
                self._error = error
            self.written += len(view)
            if self.on_first_write is not None:
                self.on_first_write()
                self.on_first_write = None
        return len(view)

    def flush(self) -> None:
        """Do nothing, as nothing is buffered here; `torch.save` needs the method."""

    def raise_write_error(self) -> None:
        """Raise the OSError of a `write`, if there was one."""
        if self._error is not None:
            raise self._error

    @property
    def sha256(self) -> str:
        """Hexadecimal digest of everything written so far."""
        return self._digest.hexdigest()
