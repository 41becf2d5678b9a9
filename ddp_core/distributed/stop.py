"""Stopping on request: a signal or a time limit asks for it, and all ranks stop after the same step."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ddp_core.errors import ExitCode, UserError

ASKED_ELSEWHERE = "another rank was asked to"


class StopRequest:
    """Turns a signal that asks to stop into a flag; a second SIGINT ends the process at once.

    These are SIGTERM, SIGINT, SIGHUP where it is not ignored (`nohup`), and an early signal of a scheduler. They are
    handled while in a `with` block. `max_seconds` counts from the creation of this object. `launched`: a launcher of
    ours passes on what it hears, so a second SIGINT may be the first, sent to every process; it kills the impatient
    user's workers itself.
    """

    def __init__(
        self, early_signal: str | None = None, max_seconds: float | None = None, launched: bool = False
    ) -> None:
        self.reason: str | None = None
        self._deadline = None if max_seconds is None else time.monotonic() + max_seconds
        self._signals = [*asking_signals(), signal.SIGINT]
        if early_signal:
            self._signals.append(signal_named(early_signal))
        self._previous: dict[int, Any] = {}
        self._launched = launched

    @property
    def requested(self) -> bool:
        """Whether this process has been asked to stop, or its time is up."""
        if self.reason is None and self._deadline is not None and time.monotonic() >= self._deadline:
            self.reason = "time limit"
        return self.reason is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason == "SIGINT" and not self._launched:
            os._exit(128 + signal.SIGINT)
        self.reason = reason_of(number)

    def __enter__(self) -> StopRequest:
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *details: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class AskedToStop(KeyboardInterrupt):
    """A signal asks to stop while nothing is trained. A KeyboardInterrupt, because no library keeps that to itself."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@contextlib.contextmanager
def stops_at_once() -> Iterator[None]:
    """While in the block, SIGTERM and SIGHUP raise AskedToStop: from the start of the command until it trains.

    A StopRequest or a launcher that handles the signals goes before, as long as it does.
    """

    def stop(number: int, _: FrameType | None) -> None:
        raise AskedToStop(reason_of(number))

    before = {number: signal.signal(number, stop) for number in asking_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def asking_signals() -> list[signal.Signals]:
    """The signals by which others ask a process to stop: SIGTERM, and SIGHUP unless it is ignored, as under `nohup`."""
    heard = [signal.SIGTERM]
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
