"""Calls the user's callbacks at their moments; only this file calls them."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_core.base.user_code import user_code
from ddp_core.observe.callback import Moment
from ddp_core.observe.step import StepBatch, StepObserver, StepReport
from ddp_core.trainers.job import Job
from ddp_core.trainers.train_state import TrainState


class CallbackCalls(StepObserver):
    """The callbacks of this rank; without any, nothing is done at any moment."""

    def __init__(self, job: Job, state: TrainState) -> None:
        self._job, self._state = job, state
        first = job.collectives.world.is_first
        self._callbacks = [callback for callback in job.callbacks if first or callback.ranks == "all"]
        self._loss: float | None = None

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def gradients_done(self, batch: StepBatch, reports: Sequence[StepReport]) -> None:
        self._loss = reports[-1].loss / reports[-1].samples if reports else None

    def after_step(self, batch: StepBatch) -> None:
        moment = self._moment(batch.epoch, self._loss)
        with user_code("your callback"):
            for callback in self._callbacks:
                callback.on_step(moment)

    def epoch_done(self, epoch: int) -> None:
        """Call every `on_epoch`."""
        moment = self._moment(epoch, self._state.last_epoch_loss)
        with user_code("your callback"):
            for callback in self._callbacks:
                callback.on_epoch(moment)

    def end(self, epoch: int) -> None:
        """Call every `on_end`."""
        moment = self._moment(epoch, self._state.last_epoch_loss)
        with user_code("your callback"):
            for callback in self._callbacks:
                callback.on_end(moment)

    def _moment(self, epoch: int, loss: float | None) -> Moment:
        state = self._state
        return Moment(
            step=state.step,
            epoch=epoch,
            loss=loss,
            learning_rate=state.learning_rate,
            evaluation=state.evaluation,
            model=state.model,
            averaged_model=None if state.average is None else state.average.module,
            rank=self._job.collectives.world.rank,
            directory=self._job.directory,
        )
