"""Takes back what a forward has done to buffers, batch-norm statistics for example, when its loss is not finite."""

from __future__ import annotations

from ddp_core.observe.step import StepBatch, StepObserver
from ddp_core.trainers.train_state import TrainState


class BufferCopies(StepObserver):
    """Keeps the buffers of each step's beginning, and puts them back where the step is skipped."""

    def __init__(self, state: TrainState) -> None:
        self._state = state

    def before_step(self, batch: StepBatch) -> None:
        self._state.keep_buffers()

    def skipped(self, batch: StepBatch) -> None:
        self._state.put_back_buffers()
