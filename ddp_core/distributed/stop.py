"""Stopping on request: a signal or a time limit asks for it, and all ranks stop after the same step."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ddp_core.base.errors import ExitCode, UserError, in_words

ASKED_ELSEWHERE = "another rank was asked to"


class StopRequest:
    """Turns a signal that asks to stop into a flag; a second SIGINT ends the process at once, unless all is `saved`.

    These are SIGTERM, SIGINT, SIGHUP where it is not ignored (`nohup`), and an early signal of a scheduler. They are
    handled while in a `with` block. `max_seconds` counts from the creation of this object. `launched`: a launcher of
    ours passes on what it hears, so a second SIGINT may be the first, sent to every process; it kills the impatient
    user's workers itself. `last`: after the block this process only leaves, and ignores what still comes.
    """

    def __init__(
        self,
        early_signal: str | None = None,
        max_seconds: float | None = None,
        launched: bool = False,
        last: bool = False,
    ) -> None:
        self.reason: str | None = None
        self._deadline = None if max_seconds is None else time.monotonic() + max_seconds
        self._signals = [*asking_signals(early_signal), signal.SIGINT]
        self._previous: dict[int, Any] = {}
        self._may_hurry, self._last = not launched, last

    @property
    def requested(self) -> bool:
        """Whether this process has been asked to stop, or its time is up."""
        if self.reason is None and self._deadline is not None and time.monotonic() >= self._deadline:
            self.reason = "time limit"
        return self.reason is not None

    def saved(self) -> None:
        """What was asked for is done: nothing would be won by leaving at once."""
        self._may_hurry = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason == "SIGINT" and self._may_hurry:
            os._exit(128 + signal.SIGINT)
        self.reason = reason_of(number)

    def __enter__(self) -> StopRequest:
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *details: object) -> None:
        for number, handler in self._previous.items():
            # Ctrl-C stays a way out of a process that nobody has asked yet.
            deaf = self._last and (number != signal.SIGINT or self.reason is not None)
            signal.signal(number, signal.SIG_IGN if deaf else handler)


@contextlib.contextmanager
def stops_at_once(*numbers: signal.Signals, silent: bool = False) -> Iterator[None]:
    """While in the block, each of these signals ends this process: until it trains, there is nothing to save.

    It ends with 75 and one line, unless `silent`; with 130 after SIGINT. A StopRequest or a launcher that handles the
    signals goes before, as long as it does, and what it leaves ignored stays so.
    """

    def leave(number: int, _: FrameType | None) -> None:
        # An exception would be lost: modules that are imported in C++ drop it, and so does Python while it clears an
        # object away. Nothing is to be cleaned up, and children die with this process.
        interrupted, error = number == signal.SIGINT, stopped_outside(reason_of(number))
        said = "interrupted" if interrupted else in_words(error.exit_code, str(error))
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            os.write(2, b"" if silent else f"ddp: {said}\n".encode())
        os._exit(128 + number if interrupted else error.exit_code)

    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is leave:
                signal.signal(number, handler)


@contextlib.contextmanager
def ignores_afterwards(*numbers: signal.Signals) -> Iterator[None]:
    """After the block these signals are ignored: the process leaves, and its exit code says how that went.

    A handler in Python would not do: the interpreter puts the default in its place before it ends.
    """
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def signals_as_before() -> Iterator[None]:
    """After the block every signal is handled as before it."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def asking_signals(early: str | None = None) -> list[signal.Signals]:
    """The signals by which others ask a process to stop: SIGTERM, and SIGHUP unless it is ignored, as under `nohup`.

    Also `early`, the name of a scheduler's early signal. Raises UserError for an unknown name.
    """
    heard = [signal.SIGTERM, *([signal_named(early)] if early else [])]
    return heard if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*heard, signal.SIGHUP]


def die_when_asked() -> None:
    """Let a signal that asks to stop end this process at once, until a StopRequest handles it.

    For the workers of a launcher of ours, which knows what such an end means.
    """
    for number in (*asking_signals(), signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def reason_of(number: int) -> str:
    """The signal's name, for messages, and what it means where that is not known to everybody."""
    name = signal.Signals(number).name
    return f"{name}: the terminal was closed" if number == signal.SIGHUP else name


def signal_named(name: str) -> signal.Signals:
    """The signal called USR1 or SIGUSR1. Raises UserError for an unknown name."""
    try:
        return signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"]
    except KeyError:
        raise UserError(f"--stop-signal {name}: no such signal; for example USR1") from None


class Stopped(UserError):
    """The run was saved and ended on request; `command` continues it."""

    def __init__(self, reason: str, step: int, command: str = "--resume auto") -> None:
        super().__init__(f"stopped at step {step} ({reason}); saved, continue with {command}", ExitCode.STOPPED)
        self.reason = reason
        self.step = step
        self.command = command

    def __reduce__(self) -> tuple[type[Stopped], tuple[object, ...]]:
        return (type(self), (self.reason, self.step, self.command))


def stopped_outside(reason: str) -> UserError:
    """The error (75) for a command that ended on request while no step was trained, so there was nothing to save."""
    return UserError(f"stopped while nothing was trained ({reason}); continue with --resume auto", ExitCode.STOPPED)
