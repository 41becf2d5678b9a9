"""One run per directory: a lock that the kernel releases when its holder dies."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Self

from typing_extensions import TypedDict

from ddp_core.base.beneath import NotAFile, open_beneath, open_file
from ddp_core.base.documents import BadDocument, Count, read_document
from ddp_core.base.errors import UserError
from ddp_core.base.files import take_lock
from ddp_core.base.refusals import refused
from ddp_core.base.shown import shown_in
from ddp_core.distributed.processes import state_of

_NAME = "run.lock"
_PATIENCE_SECONDS = 0.5
"""How long a process that is no run may hold the lock: see RunLock."""


class RunLock:
    """The right to run in `directory`: `with RunLock(directory): …`, or `acquire` and `release`.

    It is a flock on `run.lock`: the kernel releases it when the process ends, and it also works between containers that
    share a volume. The file names the holder. The file stays after the release: if it were removed, two holders could
    lock two files of the same name.

    For a moment a process that is no run may hold the lock: one that only tests it (`is_held`), or a fork of a killed
    run that has not closed its copy yet. So both `acquire` and `is_held` try for half a second. A POSIX lock
    (`fcntl.lockf`) is not passed on to forks. But a process loses such a lock silently when it closes any other
    descriptor of the file, as any code that copies the run's directory does, and two runs could then work in one
    directory. At worst, a flock keeps a run out for a moment.
    """

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory) / _NAME
        self._descriptor: int | None = None

    def acquire(self) -> Self:
        """Take the lock. Raises UserError (2), naming the holder, within a second, or (4) if it cannot be written."""
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        content = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = open_beneath(self.path, os.O_RDWR | os.O_CREAT)
            if not take_lock(self._descriptor, patience=_PATIENCE_SECONDS):
                self.release()
                raise _in_use(self.path)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, content.encode(), 0)
        except OSError as error:
            self.release()
            raise refused(error, self.path) from error
        # A forked data loader worker that outlives this process would keep the lock, so every fork closes its copy.
        os.register_at_fork(after_in_child=self.release)
        return self

    def release(self) -> None:
        """Give the lock back; does nothing if it is not held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(self, *details: object) -> None:
        self.release()


def is_held(directory: str | Path, patience: float | None = None) -> bool:
    """Whether a process, on this host or in another container, runs in `directory`; True takes `patience` seconds."""
    try:
        file = open_file(Path(directory) / _NAME)
    except (FileNotFoundError, NotAFile):
        return False
    with file:
        return not take_lock(file.fileno(), shared=True, patience=_PATIENCE_SECONDS if patience is None else patience)


def require_unlocked(directory: Path) -> None:
    """Raises UserError (2), naming the holder, where another process runs in `directory`."""
    # A lock that may be left of a killed run is waited for; not where the process that it names lives here.
    path = directory / _NAME
    holder = _holder(path)
    lives_here = holder and holder["host"] == socket.gethostname() and state_of(holder["pid"]) != "gone"
    if is_held(directory, 0.0 if lives_here else _PATIENCE_SECONDS):
        raise _in_use(path)


def _in_use(path: Path) -> UserError:
    who = "a process that has not written its name yet"
    if (holder := _holder(path)) is not None:
        who = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    return UserError(f"another run is using {path.parent}: {who}; wait for it, stop it, or give another directory")


class _Holder(TypedDict):
    host: str
    pid: Count
    since: str


def _holder(path: Path) -> _Holder | None:
    """Who holds the lock; None where it has not written its name yet."""
    try:
        holder: _Holder = shown_in(read_document(path, _Holder))
        return holder
    except (OSError, BadDocument):
        return None
