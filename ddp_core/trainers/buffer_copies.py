"""Copies of buffers, such as batch-norm statistics, which a forward changes before anybody knows whether it counts."""

from __future__ import annotations

from ddp_core.observe.step import StepBatch, StepObserver
from ddp_core.trainers.train_state import TrainState


class BufferCopies(StepObserver):
    """Keeps the buffers of each step's beginning; they come back where the step is skipped, or dropped."""

    def __init__(self, state: TrainState) -> None:
        self._state = state

    def before_step(self, batch: StepBatch) -> None:
        self._state.keep_buffers()

    def skipped(self, batch: StepBatch) -> None:
        self._state.put_back_buffers()
