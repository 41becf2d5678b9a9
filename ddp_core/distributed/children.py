"""Child processes that a command starts and waits for: they end with it, whatever ends it, and so does their folder.

The kernel kills a child when this process ends (PR_SET_PDEATHSIG). What is left then, a watcher clears away: it reads
from a pipe whose other end only this process holds, learns from it which process groups are alive, and at its end kills
them and removes the folder. So it makes no difference whether this process comes to its end, is interrupted or killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple, Self

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.process import die_with_parent

# Processes that were just killed may write until they are gone, and a folder in use cannot be removed. A user's script
# may have left folders without the right to write, from which nothing can be removed either.
_WATCHER = """
while read -r living; do groups=$living; done
[ -z "$groups" ] || kill -s KILL -- $groups
for _ in 1 2 3 4 5 6 7 8 9 10; do
    rm -rf -- "$1" && break
    chmod -R u+rwx -- "$1"
    sleep 0.5
done
"""
_VARIABLES = {"DDP_REHEARSAL": "off"}
"""The command compares what its children have trained, so none of these trainings is rehearsed."""
_SPEAKERS = ("ddp: error: ", "ddp: stopped: ")


class Ended(NamedTuple):
    """How a `ddp` command ended: its exit code, and what it wrote to standard output and to standard error."""

    code: int
    output: str
    errors: str

    def error(self) -> UserError:
        """The error of a command that has failed."""
        return error_of(self.code, self.errors.splitlines())


def error_of(code: int, lines: Iterable[str], words: Sequence[str] = ()) -> UserError:
    """The error with which a command has failed that printed these lines: the last that it calls one, else its last.

    `code` is minus the signal's number where one has killed it. With `words`, those of the command, it begins with
    them.
    """
    printed = [line.strip() for line in lines if line.strip()]
    errors = [line for line in printed if line.startswith(_SPEAKERS)]
    said = (errors or printed or ["no message"])[-1].removeprefix("ddp: ").removeprefix("error: ")
    how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with {code}"
    known = ExitCode(code) if code in set(ExitCode) else ExitCode.INTERNAL
    return UserError(f"`ddp {' '.join(words)}` {how}: {said}" if words else said, known)


class Children:
    """A temporary folder and the processes that work in it. Use as a context manager; both end with the block."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._living: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        self.folder = Path(mkdtemp(prefix=self._prefix)).resolve()
        """The folder, also for temporary files of the processes."""
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHER, "ddp-watcher", str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # A terminal's Ctrl-C shall not reach it.
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        for process in list(self._living):
            self.end(process)
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()
        self._watcher.wait()

    def start(self, command: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
        """Start a process in a session of its own, so that a Ctrl-C reaches this process alone.

        `how`: further arguments of subprocess.Popen.
        """
        how = {"stdin": subprocess.DEVNULL, "env": {**os.environ, **_VARIABLES, "TMPDIR": str(self.folder)}, **how}
        process = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent, **how)
        self._living.append(process)
        self._tell()
        return process

    def end(self, process: subprocess.Popen[Any]) -> None:
        """Kill the process, and all that it has started in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._living.remove(process)
        self._tell()

    def ddp(self, words: Sequence[str]) -> Ended:
        """Run a `ddp` command to its end."""
        heard: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with self.start([sys.executable, "-m", "ddp_core", *words], **heard, errors="replace") as process:
            try:
                output, errors = process.communicate()
            finally:
                self.end(process)
        return Ended(process.returncode, output, errors)

    def _tell(self) -> None:
        """Tell the watcher which process groups are alive."""
        assert self._watcher.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # where somebody has killed it
            self._watcher.stdin.write((" ".join(f"-{each.pid}" for each in self._living) + "\n").encode())
            self._watcher.stdin.flush()
