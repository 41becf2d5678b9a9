"""Stopping on request: a signal or a time limit asks for it, and all ranks stop after the same step."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Any

from ddp_core.errors import ExitCode, UserError

ASKED_ELSEWHERE = "another rank was asked to"


class StopRequest:
    """Turns SIGTERM, SIGINT and an early signal of a scheduler into a flag; a second SIGINT ends the process at once.

    The signals are handled while in a `with` block. `max_seconds` counts from the creation of this object.
    """

    def __init__(self, early_signal: str | None = None, max_seconds: float | None = None) -> None:
        self.reason: str | None = None
        self._deadline = None if max_seconds is None else time.monotonic() + max_seconds
        self._signals = [signal.SIGTERM, signal.SIGINT]
        if early_signal:
            self._signals.append(signal_named(early_signal))
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether this process has been asked to stop, or its time is up."""
        if self.reason is None and self._deadline is not None and time.monotonic() >= self._deadline:
            self.reason = "time limit"
        return self.reason is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason == "SIGINT":
            os._exit(128 + signal.SIGINT)
        self.reason = signal.Signals(number).name

    def __enter__(self) -> StopRequest:
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *details: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def signal_named(name: str) -> signal.Signals:
    """The signal called USR1 or SIGUSR1. Raises UserError for an unknown name."""
    try:
        return signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"]
    except KeyError:
        raise UserError(f"--stop-signal {name}: no such signal; for example USR1") from None


class Stopped(UserError):
    """The run was saved and ended on request; it can be resumed."""

    def __init__(self, reason: str, step: int) -> None:
        super().__init__(f"stopped at step {step} ({reason}); saved, continue with --resume auto", ExitCode.STOPPED)
        self.reason = reason
        self.step = step

    def __reduce__(self) -> tuple[type[Stopped], tuple[str, int]]:
        return (type(self), (self.reason, self.step))
