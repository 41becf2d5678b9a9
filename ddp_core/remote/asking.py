"""What the rest of `ddp` asks for: each is done by a process of its own, which has the store's packages and threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ddp_core.base.errors import ExitCode
from ddp_core.distributed.children import error_of
from ddp_core.remote import is_address
from ddp_core.remote.address import Address

_PROGRAM = (sys.executable, "-m", "ddp_core.remote")


def _asked(*words: str) -> str:
    """What the process prints. Raises the UserError that it has met."""
    ended = subprocess.run(
        [*_PROGRAM, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    lines = ended.stderr.splitlines()
    if ended.returncode != 0:
        raise error_of(ended.returncode, lines)
    for line in lines:
        print(line, file=sys.stderr, flush=True)
    return ended.stdout.rstrip("\n")


def local(named: str | os.PathLike[str], *, records_only: bool = False) -> Path:
    """The path that is named, or that of a copy of what lies at the address that is named. Raises UserError."""
    if not is_address(named):
        return Path(named)
    return Path(_asked("bring", str(named), *(["--records"] if records_only else [])))


def to_continue(address: str, *, records_only: bool = False) -> Path:
    """Where what lies at the address can be trained on: it is brought there where it is not. Raises UserError."""
    return Path(_asked("bring", address, "--to-write", *(["--records"] if records_only else [])))


def require_writable(address: str) -> None:
    """Raises UserError (4) where this process may not write there."""
    _asked("check", address)


class Copying:
    """A block during which what is committed below `folder` is copied to the address; it ends once all of it has been.

    The process that copies outlives this one where that is killed, and then copies what was saved before.
    """

    def __init__(self, folder: Path, address: str, more: Sequence[str] = ()) -> None:
        self._words = [*_PROGRAM, "copy", str(folder), Address.of(address).text, "--follow", *more]
        self.code: int = ExitCode.DONE
        """After the block: that of the process."""

    def __enter__(self) -> Self:
        # In a session of its own: a terminal's Ctrl-C, and a scheduler's kill of the group, are for the training.
        self._process = subprocess.Popen(self._words, stdin=subprocess.PIPE, start_new_session=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        # What asks the training to stop does not end this wait: in a container, the copier would end with this process.
        is_main = threading.current_thread() is threading.main_thread()
        asked = (signal.SIGTERM, signal.SIGHUP) if is_main else ()
        before = [(number, signal.signal(number, signal.SIG_IGN)) for number in asked]
        try:
            self.code = self._process.wait()
        finally:
            for number, handler in before:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
