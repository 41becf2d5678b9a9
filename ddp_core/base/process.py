"""What holds for this process as a whole: it does not outlive its parent, and a print never ends it."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_READER_GONE = (errno.EPIPE, errno.EIO)
"""The errors of a write whose reader has ended (`ddp train … | head`), or whose terminal is closed."""


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process the signal `by` when its parent ends, however that happens; Linux only.

    Nothing is sent for a parent that ended before this call: look at os.getppid() afterwards where that matters.
    """
    if sys.platform == "linux":
        import ctypes

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, by)


def make_patient() -> None:
    """Let prints succeed when nobody reads them any more, also those of a user's own code; harmless when repeated.

    A character that the terminal's encoding lacks is written as its code. Streams that somebody has put in place of the
    interpreter's own are left alone.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        if stream is None:  # the command was started without this stream (`>&-`)
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115
            continue
        stream.flush()
        file = _Patient(stream.fileno(), "w", closefd=False)
        patient = io.TextIOWrapper(
            file if stream.write_through else io.BufferedWriter(file),
            encoding=stream.encoding,
            # A file's name may hold bytes that are no UTF-8; they are written as they are.
            errors="surrogateescape" if stream.encoding == "utf-8" else "backslashreplace",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, patient)


class _Patient(io.FileIO):
    """A file that drops what is written after its reader has gone."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _READER_GONE:
                raise
            return memoryview(data).nbytes
