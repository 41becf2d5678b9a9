"""A fencing token: once a newer writer has taken it, an older writer that wakes up can commit nothing.

After Kleppmann, "How to do distributed locking" (2016): a lock alone does not stop a process that was paused while it
held the lock; a number that only grows does.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from typing_extensions import TypedDict

from ddp_core.base.beneath import open_beneath, remove_beneath
from ddp_core.base.documents import BadDocument, Count, read_document
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import replace_file, take_lock
from ddp_core.base.refusals import refused

_TOKEN_FILE = "fence.json"
_LOCK_FILE = "fence.lock"
_PATIENCE = 5.0
"""Seconds."""


class Superseded(UserError):
    """Another process has taken over this run's directory; the process that gets this error must stop and end."""

    def __init__(self, message: str, exit_code: int = ExitCode.PEERS_LOST) -> None:
        super().__init__(message, exit_code)


@contextmanager
def _short_lock(path: Path, patience: float) -> Iterator[None]:
    """Hold the flock of `path`.

    A process that holds it for longer than `patience` seconds is taken to be stopped: `path` is then made anew.
    """
    deadline = time.monotonic() + patience
    while True:
        descriptor = open_beneath(path, os.O_RDWR | os.O_CREAT)
        try:
            taken, is_still = take_lock(descriptor, patience=deadline - time.monotonic()), False
            with suppress(FileNotFoundError):  # another process may have removed or replaced the file since
                is_still = os.path.samestat(path.lstat(), os.fstat(descriptor))
            if is_still:
                if taken:
                    yield
                    return
                remove_beneath(path)
        finally:
            os.close(descriptor)


class _Token(TypedDict):
    token: Count
    holder: str


def _read(path: Path) -> tuple[int, str]:
    """The newest token, and which process holds it; raises UserError where the file is damaged."""
    try:
        content = read_document(path, _Token)
        return content["token"], content["holder"]
    except FileNotFoundError:
        return 0, "nobody"
    except BadDocument as error:
        raise UserError(f"{path} is damaged ({error}); remove it when no run uses this directory") from None


@dataclass(frozen=True)
class Fence:
    """The right to write in a directory, held by whoever took the highest token.

    `Fence.take(directory)` makes every earlier Fence of that directory stale. `check()` of a stale Fence raises
    Superseded; so does `with fence.holding():`, which also keeps others from taking the token until the block ends.
    `Fence(directory, token)` is the same right in another process that writes for the one that took the token.
    """

    directory: Path
    token: int
    patience: float = _PATIENCE

    @classmethod
    def take(cls, directory: str | Path, *, patience: float = _PATIENCE) -> Self:
        """Become the only writer of `directory`: its token is one more than any before.

        `patience`: seconds to wait for another process inside its short critical section; a process that stays there
        for longer is taken to be stopped. Raises UserError (4) where the directory cannot be written.
        """
        directory = Path(directory)
        path = directory / _TOKEN_FILE
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with _short_lock(directory / _LOCK_FILE, patience):
                token = _read(path)[0] + 1
                content = {
                    "token": token,
                    "holder": f"process {os.getpid()} on {socket.gethostname()}",
                    "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                }
                replace_file(path, json.dumps(content) + "\n", durable=True)
        except OSError as error:
            raise refused(error, path) from error
        return cls(directory, token, patience)

    def check(self) -> None:
        """Raise Superseded if a newer token has been taken; reads one small file. Raises OSError without directory."""
        token, holder = _read(self.directory / _TOKEN_FILE)
        if not token:
            self.directory.stat()
        if token != self.token:
            cause = f"{holder} took over with token {token}" if token else f"its {_TOKEN_FILE} is gone"
            raise Superseded(
                f"this process may no longer write to {self.directory}: {cause} (this process has {self.token}); it "
                "ends now and has left the files there as they were"
            )

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Check, and keep others from taking the token until the block ends; keep the block as short as a rename."""
        with _short_lock(self.directory / _LOCK_FILE, self.patience):
            self.check()
            yield
