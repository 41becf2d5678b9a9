"""Looks at the operations of the first step under portable numerics, and says of which it is not known what they give.

A profiler writes down the names, which changes no result and takes some milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ddp_core.numerics.known import unknown_among
from ddp_core.observe.step import StepBatch, StepObserver

_SHOWN = 5


class UnknownOperations(StepObserver):
    """Calls `warn` with one line after the first step of this process, where it has used such operations."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._profiler: torch.autograd.profiler.profile | None = None
        self._is_done = False

    def before_step(self, batch: StepBatch) -> None:
        if self._is_done:
            return
        self._is_done = True
        profiler = torch.autograd.profiler.profile()
        try:
            profiler.__enter__()
        except RuntimeError:
            return  # somebody else's profiler is on, and torch has one at a time
        self._profiler = profiler

    def after_step(self, batch: StepBatch) -> None:
        profiler = self.close()
        if profiler is None:
            return
        found = profiler.kineto_results
        names = unknown_among(event.name() for event in found.events()) if found is not None else []
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            self._warn(
                f"numerics portable: not known to have the same bits on other CPUs: {', '.join(names[:_SHOWN])}{more} "
                "(docs/reference/portable-numerics.md#operations)"
            )

    def close(self) -> torch.autograd.profiler.profile | None:
        """End the profiler and return it, if there is one: also where a step was not finished."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.__exit__(None, None, None)
        return profiler
