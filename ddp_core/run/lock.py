"""One run per directory: a lock that the kernel releases when its holder dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

from ddp_core.errors import ExitCode, UserError

_NAME = "run.lock"
_PATIENCE_S = 0.5  # a probe may hold it for a moment


class RunLock:
    """The right to run in `directory`: `with RunLock(directory): …`, or `acquire` and `release`.

    It is a flock on `run.lock`, which the kernel gives back with the process, and which holds between containers that
    share a volume. The file names the holder. It stays after the release: to remove it would let two holders lock two
    files of one name.
    """

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory) / _NAME
        self._descriptor: int | None = None

    def acquire(self) -> Self:
        """Take the lock; raises UserError (2) within a second, naming the holder, or (4) if it cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror}; give an output directory that this user may write to",
                ExitCode.RESOURCES,
            ) from error
        deadline = time.monotonic() + _PATIENCE_S
        while not _try(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise UserError(
                    f"another run is using {self.path.parent}: {_holder(self.path)}; wait for it, stop it, or give "
                    "another directory",
                    ExitCode.BAD_INPUT,
                )
            time.sleep(0.02)
        self._descriptor = descriptor
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        content = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}) + "\n"
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, content.encode(), 0)
        except OSError as error:
            self.release()
            raise UserError(f"cannot write {self.path}: {error.strerror}", ExitCode.RESOURCES) from error
        # A forked data loader worker that outlives this process would keep the lock.
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(this()))
        return self

    def release(self) -> None:
        """Give the lock back; does nothing if it is not held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def is_held(directory: str | Path) -> bool:
    """Whether some process, on this host or another container, runs in `directory` at this moment."""
    try:
        descriptor = os.open(Path(directory) / _NAME, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _try(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _try(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(path: Path) -> str:
    try:
        content = json.loads(path.read_text())
        return f"process {content['pid']} on {content['host']}, since {content['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that has not written its name yet"


def _forget(lock: RunLock | None) -> None:
    if lock is not None:
        lock.release()
