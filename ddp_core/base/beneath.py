"""Files of a directory that a stranger may have filled: written and removed beneath it, and read, without a surprise.

No link beneath the directory is followed to write or to remove, since it may lead to any file of the user. What is read
is a regular file: a pipe would keep the reader waiting, and a device has no end. The directory itself may be reached
through links.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from ddp_core.base.errors import UserError

MOST_BYTES = 2**26
"""How large a file may be that is read as a whole, or one line of a longer file."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class NotAFile(OSError):
    """A pipe, a socket or a device has the name of a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "it is a pipe or a device, not a file", str(path))


def open_beneath(path: Path, flags: int, root: Path | None = None) -> int:
    """Open or make the regular file `path` to write; returns its descriptor.

    `root`: the directory beneath which no link is followed; by default the folder of the file. Raises UserError for a
    link, a pipe or a device, and OSError.
    """
    with folder_of(path, root) as folder:
        descriptor = _open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _refused(path, "a pipe or a device")
    return descriptor


def remove_beneath(path: Path, root: Path | None = None) -> None:
    """Remove the file, if it is there; of a link the link alone. Raises as `open_beneath` does."""
    with contextlib.suppress(FileNotFoundError), folder_of(path, root) as folder:
        os.unlink(path.name, dir_fd=folder)


def make_folder_beneath(path: Path, root: Path | None = None) -> None:
    """Make the folder, unless it is there. Raises as `open_beneath` does."""
    with folder_of(path, root) as folder:
        with contextlib.suppress(FileExistsError), naming(path):
            os.mkdir(path.name, dir_fd=folder)
        os.close(_open(path, _FOLDER, folder))


@contextlib.contextmanager
def folder_of(path: Path, root: Path | None = None) -> Iterator[int]:
    """The descriptor of the folder of `path`, open in the block. Raises as `open_beneath` does."""
    here = path.parent if root is None else root
    with naming(here):
        descriptor = os.open(here, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in path.parent.relative_to(here).parts:
            here /= name
            outer, descriptor = descriptor, _open(here, _FOLDER, descriptor)
            os.close(outer)
        yield descriptor
    finally:
        os.close(descriptor)


def open_file(path: Path) -> BufferedReader:
    """Open the regular file to read. Raises NotAFile, and OSError."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotAFile(path)
    return file


def read_file(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of the regular file. Raises NotAFile, OSError (EFBIG) for more than `most_bytes`, and OSError."""
    with open_file(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes:,} bytes", str(path))
    return content


def each_line(path: Path) -> Iterator[bytes]:
    """The lines of the regular file with their ends, the last one perhaps torn; it ends before one of over 64 MiB."""
    with open_file(path) as file:
        while line := file.readline(MOST_BYTES + 1):
            if len(line) > MOST_BYTES:
                return
            yield line


def _open(path: Path, flags: int, folder: int) -> int:
    """Open the entry of the folder that `path` names."""
    try:
        with naming(path):
            return os.open(path.name, flags, 0o666, dir_fd=folder)
    except OSError:
        with contextlib.suppress(OSError):
            mode = os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                raise _refused(path, "a link") from None
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise _refused(path, "a pipe or a device") from None
        raise


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """A block in which an OSError names this file: that of a write names none, and others the last part of its path."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def _refused(path: Path, what: str) -> UserError:
    return UserError(f"{path} is {what}, and nothing is written through one: remove it, or give another directory")
