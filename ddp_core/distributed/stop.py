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
    """Turns a signal that asks to stop into a flag; a second SIGINT ends the process at once, until all is `saved`.

    The signals are SIGTERM, SIGINT, SIGHUP where it is not ignored (`nohup`), and an early signal of a scheduler. They
    are handled while in a `with` block. `max_seconds` counts from the creation of this object.

    `launched`: this process is a worker of our launcher, which passes its signals on. So a second SIGINT may be a copy
    of the first, and does not end this process; the launcher kills its workers when the user presses Ctrl-C again.
    `last`: after the block this process only leaves, and ignores what still comes. `confirmed_by`: a signal counts only
    once this file is there, which the launcher writes before it asks. A scheduler may send its signal to every process
    of a node, and then the launcher alone decides whether only this node leaves or all stop.
    """

    def __init__(
        self,
        early_signal: str | None = None,
        max_seconds: float | None = None,
        launched: bool = False,
        last: bool = False,
        confirmed_by: str | None = None,
    ) -> None:
        self.reason: str | None = None
        self._heard: str | None = None
        self._confirmed_by = confirmed_by
        self._deadline = None if max_seconds is None else time.monotonic() + max_seconds
        self._signals = [*asking_signals(early_signal), signal.SIGINT]
        self._previous: dict[int, Any] = {}
        self._may_hurry, self._last = not launched, last

    @property
    def requested(self) -> bool:
        """Whether this process has been asked to stop, or its time is up."""
        if self.reason is None and self._deadline is not None and time.monotonic() >= self._deadline:
            self.reason = "time limit"
        if self.reason is None and self._heard is not None and self._is_confirmed:
            self.reason = self._heard
        return self.reason is not None

    @property
    def _is_confirmed(self) -> bool:
        return self._confirmed_by is None or os.path.exists(self._confirmed_by)  # noqa: PTH110 each step may ask

    def saved(self) -> None:
        """Tell that all is saved: from now on a second SIGINT ends nothing, because the process leaves anyway."""
        self._may_hurry = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason == "SIGINT" and self._may_hurry:
            os._exit(128 + signal.SIGINT)
        self._heard = describe_signal(number)
        if self._is_confirmed:
            self.reason = self._heard

    def __enter__(self) -> StopRequest:
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *details: object) -> None:
        for number, handler in self._previous.items():
            # Nobody has asked this process to stop yet, so Ctrl-C still ends it.
            is_way_out = number == signal.SIGINT and self.reason is None
            signal.signal(number, signal.SIG_IGN if self._last and not is_way_out else handler)


@contextlib.contextmanager
def stops_at_once(*numbers: signal.Signals, prints: bool = True) -> Iterator[None]:
    """While in the block, each of these signals ends this process: until it trains, there is nothing to save.

    The exit code is 75, or 130 after SIGINT; `prints` says whether a line tells why. A StopRequest or a launcher may
    handle the signals inside the block, and what it leaves ignored stays ignored.
    """

    def leave(number: int, _: FrameType | None) -> None:
        # An exception could be lost: C++ code that imports a module drops it, and so does Python while it deletes an
        # object. There is nothing to clean up, and children die with this process.
        interrupted, error = number == signal.SIGINT, stopped_untrained(describe_signal(number))
        said = "interrupted" if interrupted else in_words(error.exit_code, str(error))
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        if prints:
            with contextlib.suppress(OSError):
                os.write(2, f"ddp: {said}\n".encode())
        os._exit(128 + number if interrupted else error.exit_code)

    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is leave:
                signal.signal(number, handler)


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

    `early` is the name of one more, a scheduler's early signal. Raises UserError for an unknown name.
    """
    heard = [signal.SIGTERM, *([signal_named(early)] if early else [])]
    return heard if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*heard, signal.SIGHUP]


def die_when_asked() -> None:
    """Let a signal that asks to stop end this worker at once, until a StopRequest handles it.

    Our launcher sees by which signal the worker has died, and tells the user.
    """
    for number in (*asking_signals(), signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def describe_signal(number: int) -> str:
    """The signal's name, for messages, and for the less known SIGHUP what it means."""
    name = signal.Signals(number).name
    return f"{name}: the terminal was closed" if number == signal.SIGHUP else name


def signal_named(name: str) -> signal.Signals:
    """The signal called USR1 or SIGUSR1. Raises UserError for an unknown name, and one that no process can handle."""
    try:
        found = signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"]
    except KeyError:
        raise UserError(f"--stop-signal {name}: no such signal; for example USR1") from None
    if found in (signal.SIGKILL, signal.SIGSTOP):
        raise UserError(f"--stop-signal {name}: no process can handle this signal; give another, for example USR1")
    return found


class Regroup(Exception):
    """This process has left its group, with the state that it held then, to meet the others in another one."""


class Stopped(UserError):
    """The run was saved and ended on request; `command` continues it."""

    def __init__(self, reason: str, step: int, command: str = "--resume auto") -> None:
        super().__init__(f"stopped at step {step} ({reason}); saved, continue with {command}", ExitCode.STOPPED)
        self.reason = reason
        self.step = step
        self.command = command

    def __reduce__(self) -> tuple[type[Stopped], tuple[object, ...]]:
        return (type(self), (self.reason, self.step, self.command))


def stopped_untrained(reason: str) -> UserError:
    """The error (75) for a command that was asked to stop while it trained no step, so that nothing is to be saved."""
    return UserError(f"stopped while nothing was trained ({reason}); continue with --resume auto", ExitCode.STOPPED)
