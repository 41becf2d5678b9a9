"""Files that a reader finds whole or not at all, also after a power cut, and locks that end with their process.

Most writers need `replace_file`. `NewFile` does the same for content that is written piece by piece. `take_lock` is the
only way in which a lock is taken.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from ddp_core.base.beneath import folder_of, naming, open_beneath, open_file, remove_beneath
from ddp_core.base.errors import UserError

_POLL_SECONDS = 0.005
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{12}\.tmp")


def replace_file(target: Path, content: str | bytes, *, durable: bool = False, root: Path | None = None) -> None:
    """Write `target` anew: a reader finds the old content or the new content, and a failure leaves the old content.

    Text is written as UTF-8. With `durable` the content and the name are on the disk before this returns, so that they
    survive a crash of the machine. `root`: as for `open_beneath`. Raises OSError.
    """
    with NewFile(target, root) as new:
        new.write(content.encode() if isinstance(content, str) else content)
        if durable:
            new.sync()
        new.rename()
    if durable:
        sync(target.parent)


class LineFile:
    """A text file to which whole lines are appended, so that it can be read at any time. Its OSErrors name the file."""

    def __init__(self, path: Path, errors: str = "strict") -> None:
        self.path = path
        descriptor = open_beneath(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._file = os.fdopen(descriptor, "a", buffering=1, encoding="utf-8", errors=errors)

    def write(self, line: str) -> None:
        """Append the line, which has no line feed. Raises OSError."""
        with naming(self.path):
            self._file.write(line + "\n")

    def close(self) -> None:
        """Write what is left, and close the file. Raises OSError."""
        with naming(self.path):
            self._file.close()


def make_directory(directory: Path) -> None:
    """Make the folder, and the folders above it that are missing, so that they survive a power cut. Raises OSError."""
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        sync(directory.parent)


class NewFile:
    """A file under a unique temporary name beside `target`; `rename` makes it `target`.

    Leaving the context without `rename` removes the file. It is locked with flock while it is open. By this lock, a
    process that removes the files of dead writers recognises the file of a live writer, even of a writer in another
    container, whose processes it cannot see. `root`: as for `open_beneath`.
    """

    def __init__(self, target: Path, root: Path | None = None) -> None:
        self.target = target
        self._root, self._renamed = root, False
        while True:
            self.temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
            self._descriptor = open_beneath(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, root)
            try:
                with naming(self.temporary):
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            except BaseException:  # a file system without locks, say: the context is never entered, so never left
                self.__exit__(None, None, None)
                raise
            if os.fstat(self._descriptor).st_nlink:
                break
            os.close(self._descriptor)  # another process removed the file between open and flock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._renamed:
            with contextlib.suppress(OSError, UserError):
                remove_beneath(self.temporary, self._root)
        os.close(self._descriptor)

    def write(self, data: bytes | memoryview) -> int:
        """Append all of `data`, and return its length in bytes. Raises OSError."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += os.write(self._descriptor, view[done:])
        return len(view)

    def sync(self) -> None:
        """Wait until the bytes are on the disk. Raises OSError."""
        os.fsync(self._descriptor)

    def rename(self) -> None:
        """Give the file its real name; it stays locked until the context ends."""
        with folder_of(self.target, self._root) as folder, naming(self.temporary):
            os.rename(self.temporary.name, self.target.name, src_dir_fd=folder, dst_dir_fd=folder)
        self._renamed = True


def is_address(named: str | os.PathLike[str]) -> bool:
    """Whether this is an address in a store (`s3://bucket/runs`), and no path."""
    return "://" in os.fspath(named)


# What Path.exists and Path.is_file raise differs from one Python to the next, for a folder without permission, say.
def is_there(path: Path) -> bool:
    """Whether a file or folder is there and can be reached; False for a name that none can have."""
    return os.path.exists(path)  # noqa: PTH110


def is_file(path: Path) -> bool:
    """Whether a file is there and can be reached, and is no folder, pipe or device."""
    return os.path.isfile(path)  # noqa: PTH113


def target_of(name: str) -> str | None:
    """The name for which `NewFile` made the temporary file `name`; None where `name` is no such temporary name."""
    found = _TEMPORARY.fullmatch(name)
    return found[1] if found else None


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal digits. Raises OSError, which names the file."""
    with naming(file), open_file(file) as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the new, changed and removed names in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def take_lock(descriptor: int, *, shared: bool = False, patience: float = 0.0) -> bool:
    """Take the flock of an open file, and say whether that was possible within `patience` seconds.

    The lock is released when `descriptor` and all its copies are closed, which happens at the latest when the processes
    that have them end. Many can hold a `shared` lock at a time. Raises OSError where the file system has no locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        else:
            return True
