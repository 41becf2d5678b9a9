"""Traces of some steps, one of each rank, for Perfetto or chrome://tracing."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import torch

from ddp_core.base.beneath import make_folder_beneath
from ddp_core.base.errors import UserError
from ddp_core.base.files import NewFile
from ddp_core.observe.step import StepBatch, StepObserver


class StepProfiler(StepObserver, AbstractContextManager["StepProfiler"]):
    """Traces the steps of `window` ('first:last', counted from 1) into `trace/rank-N.json`."""

    def __init__(self, window: str, directory: Path, rank: int) -> None:
        self._first, self._last = parse_window(window)
        self._root, self._path = directory, directory / "trace" / f"rank-{rank}.json"
        self._profiler: torch.profiler.profile | None = None

    def before_step(self, batch: StepBatch) -> None:
        if batch.step + 1 != self._first:
            return
        self._profiler = torch.profiler.profile()
        self._profiler.start()

    def after_step(self, batch: StepBatch) -> None:
        if batch.step + 1 == self._last:
            self._finish()

    def __exit__(self, *error: object) -> None:
        self._finish()

    def _finish(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
            make_folder_beneath(self._path.parent)
            with NewFile(self._path, self._root) as new:
                profiler.export_chrome_trace(str(new.temporary))
                new.rename()


def parse_window(text: str) -> tuple[int, int]:
    """First and last step of 'first:last'. Raises UserError."""
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and 0 < int(first) <= int(last)):
        raise UserError(f"--profile {text}: expected FIRST:LAST steps, for example 20:25")
    return int(first), int(last)
