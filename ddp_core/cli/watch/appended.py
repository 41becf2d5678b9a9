"""A file that another process appends lines to, read a piece at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ddp_core.base.beneath import open_file

_LONGEST_LINE = 2**20


class AppendedLines:
    """The whole lines that were appended since the last time, each once; a torn last line waits for its end.

    A file that has become shorter is another one, and is read from its beginning. Lines of more than 1 MiB are left
    out: they are not ours. With `most_at_first`, only so many bytes of what is there at first are read.
    """

    def __init__(self, path: Path, most_at_first: int | None = None) -> None:
        self._path, self._most_at_first = path, most_at_first
        self._read_to = 0
        self._is_inside = False
        """Whether the next byte stands in the middle of a line that is left out."""

    @property
    def unread_bytes(self) -> int:
        """About how many bytes `read` would go through."""
        try:
            return max(0, self._path.stat().st_size - self._read_to)
        except OSError:
            return 0

    def read(self) -> Iterator[bytes]:
        """The new lines, without their ends; none where the file is missing or cannot be read."""
        try:
            file = open_file(self._path)
        except OSError:
            return
        with file:
            status = os.fstat(file.fileno())
            if status.st_size < self._read_to:
                self._read_to, self._is_inside = 0, False
            if self._most_at_first is not None and status.st_size > self._most_at_first:
                self._read_to, self._is_inside = status.st_size - self._most_at_first, True
            self._most_at_first = None
            file.seek(self._read_to)
            while line := file.readline(_LONGEST_LINE):
                is_whole = line.endswith(b"\n")
                if not is_whole and len(line) < _LONGEST_LINE:
                    return
                self._read_to += len(line)
                if is_whole and not self._is_inside:
                    yield line[:-1]
                self._is_inside = not is_whole
