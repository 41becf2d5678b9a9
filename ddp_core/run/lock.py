"""One run per directory: a lock that the kernel releases when its holder dies."""

from __future__ import annotations

import json
import os
import socket
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

from ddp_core.errors import ExitCode, UserError
from ddp_core.files import take_lock

_NAME = "run.lock"
_PATIENCE_SECONDS = 0.5
"""For how long a lock may be held that no run holds: see RunLock."""


class RunLock:
    """The right to run in `directory`: `with RunLock(directory): …`, or `acquire` and `release`.

    It is a flock on `run.lock`, which the kernel gives back with the process, and which holds between containers that
    share a volume. The file names the holder. It stays after the release: to remove it would let two holders lock two
    files of one name.

    For a moment it may be held where no run is: by a process that only asks (`is_held`), or by the fork of a run that
    was killed before the fork could close its copy. So both who wants it and who asks try for half a second.
    A POSIX lock (`fcntl.lockf`) is not passed on to forks, but a process loses it without a word when it closes any
    other descriptor of the file, as any code that copies the run's directory does: it would let two runs in, where
    this one keeps a run out for a moment.
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
        if not take_lock(descriptor, patience=_PATIENCE_SECONDS):
            os.close(descriptor)
            raise UserError(
                f"another run is using {self.path.parent}: {_holder(self.path)}; wait for it, stop it, or give "
                "another directory",
                ExitCode.BAD_INPUT,
            )
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
    """Whether some process, on this host or in another container, runs in `directory`; yes takes half a second."""
    try:
        descriptor = os.open(Path(directory) / _NAME, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not take_lock(descriptor, shared=True, patience=_PATIENCE_SECONDS)
    finally:
        os.close(descriptor)


def _holder(path: Path) -> str:
    try:
        content = json.loads(path.read_text())
        return f"process {content['pid']} on {content['host']}, since {content['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that has not written its name yet"


def _forget(lock: RunLock | None) -> None:
    if lock is not None:
        lock.release()
