"""Which loggers `--log-to` can name, and the thread that each runs in.

In a thread of its own, a slow, silent or broken logger costs the training one warning at most.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module

from ddp_core.base.extras import require
from ddp_core.observe.loggers.logged import Ending, LoggedRun, Logger

_WAITING_RECORDS = 10_000
_PATIENCE = 30.0  # seconds


def check_loggers(names: Iterable[str]) -> None:
    """Raises UserError where a package is missing, with the command that installs it, or a login."""
    for name in dict.fromkeys(names):
        require(f"--log-to {name}", name)
        if name == "wandb":
            from ddp_core.observe.loggers.wandb import require_login

            require_login()


def start_loggers(names: Iterable[str], run: LoggedRun, warn: Callable[[str], None]) -> list[BackgroundLogger]:
    """A logger for each name, already at work; `warn` is told of one that fails."""

    def start(name: str) -> BackgroundLogger:
        return BackgroundLogger(name, lambda: import_module(f"{__package__}.{name}").RunLogger(run), warn)

    return [start(name) for name in dict.fromkeys(names)]


class BackgroundLogger:
    """A logger that is made and called in a thread; `warn` is called once, from the training's own thread."""

    def __init__(
        self, name: str, make: Callable[[], Logger], warn: Callable[[str], None], patience: float = _PATIENCE
    ) -> None:
        self._name, self._make, self._warn, self._patience = name, make, warn, patience
        self._calls: queue.Queue[Callable[[Logger], None] | None] = queue.Queue(_WAITING_RECORDS)
        self._problem: str | None = None
        self._given_up = False
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._thread.start()

    def record(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Pass a record on."""
        self._tell(lambda logger: logger.record(kind, step, values))

    def finish(self, figures: Mapping[str, float], weights_sha256: str) -> None:
        """Pass the figures of the finished run on."""
        self._tell(lambda logger: logger.finish(figures, weights_sha256))

    def close(self, ending: Ending) -> None:
        """Wait until the logger has written everything, for `patience` seconds at most."""
        self._tell(lambda logger: logger.close(ending))
        self._tell(None)
        if not self._given_up:
            self._thread.join(self._patience)
            if self._thread.is_alive():
                self._problem = f"it has not ended within {self._patience:g} s"
            self._warn_of_problem()

    def _tell(self, call: Callable[[Logger], None] | None) -> None:
        """Hand a call to the thread; None ends the thread."""
        self._warn_of_problem()
        if self._given_up:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._problem = f"{_WAITING_RECORDS} records wait for it"
            self._warn_of_problem()

    def _warn_of_problem(self) -> None:
        """Warn once where the logger has a problem, and give it up."""
        if self._problem is not None and not self._given_up:
            self._given_up = True
            self._warn(f"{self._name} is left out from here on: {self._problem}; metrics.jsonl has everything")

    def _work(self) -> None:
        try:
            logger = self._make()
            while (call := self._calls.get()) is not None:
                call(logger)
        except Exception as error:
            self._problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
