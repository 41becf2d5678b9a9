"""Standard output and standard error that end no command: not when their reader has gone, not over a letter."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_READER_GONE = (errno.EPIPE, errno.EIO)
"""What writing gives where the pipe's reader has ended (`ddp train … | head`), or the terminal is closed."""


class _Patient(io.FileIO):
    """A file that drops what nobody reads any more."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _READER_GONE:
                raise
            return memoryview(data).nbytes


def make_patient() -> None:
    """Let this process's prints, also those of a user's own code, outlive their reader; does nothing a second time.

    A letter that the terminal's encoding lacks is written as its code. Streams that somebody has put in place of the
    interpreter's own are left alone.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _patient(stream))


def _patient(stream: TextIO | None) -> TextIO:
    if stream is None:  # the command was started without this stream (`>&-`)
        return open(os.devnull, "w")  # noqa: PTH123
    stream.flush()
    assert isinstance(stream, io.TextIOWrapper)
    file = _Patient(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        file if stream.write_through else io.BufferedWriter(file),
        encoding=stream.encoding,
        # A file's name may hold bytes that are no UTF-8; they are written as they are.
        errors="surrogateescape" if stream.encoding == "utf-8" else "backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
