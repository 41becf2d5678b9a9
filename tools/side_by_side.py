"""Runs commands of this project beside each other, and tells of each as soon as it has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from ddp_core.numerics.limits import LIMITS

ROOT = Path(__file__).parents[1]
_POLL_SECONDS = 0.2

_Key = TypeVar("_Key")


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int | None
    """Its exit code, negative for a signal; None where it was ended because it took too long."""
    output: str
    errors: str
    processor_seconds: float
    """Time that processors computed for the command and for what it started and waited for."""

    @property
    def last_line(self) -> str:
        """The last line that the command wrote: of its errors, if there are any."""
        return (self.errors.strip() or self.output.strip() or "nothing was said").splitlines()[-1]


@dataclass
class _Running:
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]
    deadline: float


def ended(
    commands: Mapping[_Key, Sequence[str]], at_a_time: int, limit: float
) -> contextlib.closing[Generator[tuple[_Key, Ended], None, None]]:
    """Each command's key and how it ended, when it has; `at_a_time` of them run, each for `limit` seconds at most.

    They compute in one thread under the limits of portable numerics. These are set from outside: a program that starts
    itself anew, to set them, would leave an emulator. To be used as `with ended(...) as results: for key, how in
    results`: after the block no process is left, also where it ends early, by Ctrl-C or by SIGTERM.
    """
    return contextlib.closing(_each_ended(commands, at_a_time, limit))


def _each_ended(
    commands: Mapping[_Key, Sequence[str]], at_a_time: int, limit: float
) -> Generator[tuple[_Key, Ended], None, None]:
    waiting = dict(commands)
    running: dict[_Key, _Running] = {}
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while waiting or running:
            for key in list(waiting)[: at_a_time - len(running)]:
                running[key] = _started(waiting.pop(key), limit)
            for key, command in list(running.items()):
                if (how := _how_it_ended(command)) is not None:
                    del running[key]
                    yield key, how
            time.sleep(_POLL_SECONDS)
    finally:
        for command in running.values():
            _end(command.process)
        signal.signal(signal.SIGTERM, before)


def _started(words: Sequence[str], limit: float) -> _Running:
    output, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 read when the process has ended
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=os.environ | dict(LIMITS) | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        start_new_session=True,  # Ctrl-C comes to this process alone, which then ends those that it has started
    )
    return _Running(process, output, errors, time.monotonic() + limit)


def _how_it_ended(command: _Running) -> Ended | None:
    """None while it runs; a process that runs for too long is ended."""
    pid, status, usage = os.wait4(command.process.pid, os.WNOHANG)
    code: int | None = None
    if pid:
        code = command.process.returncode = os.waitstatus_to_exitcode(status)
    elif time.monotonic() < command.deadline:
        return None
    _end(command.process)
    texts = []
    for file in (command.output, command.errors):
        file.seek(0)
        texts.append(file.read().decode(errors="replace"))
        file.close()
    return Ended(code, *texts, round(usage.ru_utime + usage.ru_stime, 1))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process and of all that it has started, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
