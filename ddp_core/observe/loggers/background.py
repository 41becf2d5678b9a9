"""Runs a logger in a thread of its own, so that a slow, silent or broken one costs the training one warning at most."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping

from ddp_core.observe.loggers.logger import Ending, Logger

_WAITING_RECORDS = 10_000
_PATIENCE = 30.0


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
            self._look()

    def _tell(self, call: Callable[[Logger], None] | None) -> None:
        self._look()
        if self._given_up:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._problem = f"{_WAITING_RECORDS} records wait for it"
            self._look()

    def _look(self) -> None:
        """Warn of the logger's problem, once."""
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
