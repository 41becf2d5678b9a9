"""What holds for this process as a whole: it does not outlive its parent, a print never ends it, what it frees stays.

Freed memory that stays with the process saves time; freed memory that goes back to the kernel saves memory. glibc
returns large blocks to the kernel as soon as they are freed, and the kernel hands out each page anew, filled with
zeros, at the first touch. A ResNet-18 on CPU spends a tenth to a fifth of its step on that, though every step allocates
tensors of the same sizes again. Where a GPU trains, so does the loading of data on the host
(`python -m benchmarks.loader`).

Where parameters are sharded, blocks of the model come and go within a step. Memory that stays with the process is then
cut into free pieces that are too small for the next block: 500 MB of them with 25 million parameters on two ranks
(`python -m benchmarks.shard_memory`).
Sources: mallopt(3); glibc, malloc/malloc.c, "M_TRIM_THRESHOLD" and "M_MMAP_THRESHOLD".
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_READER_GONE = (errno.EPIPE, errno.EIO)
"""The errors of a write whose reader has ended (`ddp train … | head`), or whose terminal is closed."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_KEPT = 1 << 30
# The largest value that glibc before 2.35 accepts.
_LARGEST_KEPT_BEFORE_2_35 = 32 << 20
_SMALLEST_RETURNED = 256 << 10


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process the signal `by` when its parent ends, however that happens; Linux only.

    Nothing is sent for a parent that ended before this call: look at os.getppid() afterwards where that matters.
    """
    if sys.platform == "linux":
        import ctypes

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, by)


def leave_first_process() -> None:
    """Go on in a child where this process is the first of its container; returns there, and everywhere else at once."""
    # A container's first process inherits every orphan, which stays a zombie until it is waited for. And the kernel
    # drops each signal for which the first process has no handler. So the first process trains nothing: it passes
    # signals on, waits, and ends with the child's exit code.
    if os.getpid() != 1:
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    child = os.fork()
    if not child:
        os.setpgid(0, 0)  # otherwise a terminal's Ctrl-C would come twice
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        number = signal.sigwait(signal.valid_signals())
        if number != signal.SIGCHLD:
            os.kill(child, number)
            continue
        ended = -1
        while ended:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == child:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)


def fix_hashes() -> None:
    """Start this process anew, with the same words, unless hashes of strings are fixed already."""
    # The order of a set of strings follows from them, and with it whatever code makes of such a set, so all processes
    # of a run must have them alike.
    was_started_so = sys.orig_argv[1 - len(sys.argv) :] == sys.argv[1:]  # not as a fork of another process
    if was_started_so and (os.environ.get("PYTHONHASHSEED") or "random") == "random":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})


def make_patient() -> None:
    """Let prints succeed when nobody reads them any more, also those of a user's own code; harmless when repeated."""
    # A character that the terminal's encoding lacks is written as its code. Streams that somebody has put in place of
    # the interpreter's own are left alone.
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        if stream is None:  # the command was started without this stream (`>&-`)
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115
            continue
        stream.flush()
        file = _Patient(stream.fileno(), "w", closefd=False)
        file.drops_all = name == "stderr"
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

    drops_all = False
    """Whether it drops whatever cannot be written: where an error cannot be told, the exit code still says it."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _READER_GONE and not self.drops_all:
                raise
            return memoryview(data).nbytes


def keep_freed_memory() -> bool:
    """Let malloc keep freed blocks of up to 1 GiB; returns whether that worked (only glibc can do it)."""
    # This changes no result: torch aligns every tensor to 64 bytes by itself.
    kept = _set_malloc(_M_MMAP_THRESHOLD, _LARGEST_KEPT) or _set_malloc(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BEFORE_2_35)
    return kept and _set_malloc(_M_TRIM_THRESHOLD, 2**31 - 1)


def return_large_blocks() -> bool:
    """Let malloc return freed blocks of 256 KiB or more at once; returns whether that worked (only glibc can do it)."""
    # Without a fixed size, glibc keeps larger and larger blocks as it sees them freed.
    return _set_malloc(_M_MMAP_THRESHOLD, _SMALLEST_RETURNED)


def _set_malloc(parameter: int, value: int) -> bool:
    import ctypes  # here, because `ddp --help` needs none

    try:
        return bool(ctypes.CDLL(None).mallopt(parameter, ctypes.c_int(value)))
    except (OSError, AttributeError, TypeError):
        return False


def let_go(last: list[object]) -> None:
    """Empty this list of destroyed process groups in a thread; the list must hold the last reference to each group."""
    # The thread that drops the last reference to a group of gloo waits for some milliseconds for each of the group's
    # connections, one after the other. The process does not end before that thread.
    threading.Thread(target=last.clear, name="parting").start()
