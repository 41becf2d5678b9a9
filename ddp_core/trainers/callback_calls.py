"""Calls the user's callbacks, and lets all ranks agree where one of them asks to end the run.

Only this file calls the callbacks.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from ddp_core.base.errors import UserError
from ddp_core.base.user_code import user_code
from ddp_core.observe.callback import Callback, Moment
from ddp_core.observe.step import StepBatch, StepObserver, StepReport
from ddp_core.trainers.job import Job
from ddp_core.trainers.train_state import TrainState

Method = Literal["on_step", "on_epoch", "on_end"]


class CallbackCalls(StepObserver):
    """Calls the callbacks of this rank."""

    def __init__(self, job: Job, state: TrainState) -> None:
        self._job, self._state = job, state
        first = job.collectives.world.is_first
        self._callbacks = [
            (position, callback) for position, callback in enumerate(job.callbacks) if first or callback.ranks == "all"
        ]
        self.has_any = bool(self._callbacks)
        """Whether this rank has a callback."""
        self._loss: float | None = None
        self._asked: dict[int, str] = {}
        """Why callbacks have asked to end the run since ranks agreed last, by their positions."""

    def gradients_done(self, batch: StepBatch, reports: Sequence[StepReport]) -> None:
        self._loss = reports[-1].loss / reports[-1].samples if reports else None

    def after_step(self, batch: StepBatch) -> None:
        self._call("on_step", batch.epoch, self._loss)

    def epoch_done(self, epoch: int, is_evaluated: bool) -> None:
        """Call every `on_epoch`."""
        self._call("on_epoch", epoch, self._state.last_epoch_loss, is_evaluated)

    def end(self, epoch: int) -> None:
        """Call every `on_end`."""
        self._call("on_end", epoch, self._state.last_epoch_loss)

    def agreed_end(self, method: Method) -> str | None:
        """Why the run ends here, the same on every rank; None where it goes on. To be called by all ranks.

        Ranks ask each other only where the experiment has a callback with this method. Raises UserError, on every
        rank, where a callback of all ranks has asked on some of them alone: another layout would go on.
        """
        if not any(_has(callback, method) for callback in self._job.callbacks):
            return None
        collectives = self._job.collectives
        asked, self._asked = self._asked, {}
        if not collectives.sum_(torch.tensor([float(bool(asked))])).item():
            return None
        by_rank = collectives.gather(asked)
        for position, callback in enumerate(self._job.callbacks):
            ranks = [rank for rank, each in enumerate(by_rank) if position in each]
            if callback.ranks == "all" and 0 < len(ranks) < len(by_rank):
                raise UserError(
                    f"after step {self._state.step}, callback {type(callback).__name__} asked to end the run on "
                    f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {len(by_rank)} alone "
                    f"({by_rank[ranks[0]][position]}), so another layout would go on: let it look at what all ranks "
                    'have alike, such as moment.loss and moment.evaluation; or with ranks = "first" rank 0 asks for all'
                )
        first: dict[int, str] = by_rank[0]
        return first[min(first)]

    def _call(self, method: Method, epoch: int, loss: float | None, is_evaluated: bool = False) -> None:
        if not self._callbacks:
            return
        state, directory = self._state, self._job.directory
        assert directory is not None, "callbacks are called in a run directory"
        moment = Moment(
            step=state.step,
            epoch=epoch,
            loss=loss,
            learning_rate=state.learning_rate,
            evaluation=state.evaluation,
            model=state.model,
            averaged_model=None if state.average is None else state.average.module,
            rank=self._job.collectives.world.rank,
            directory=directory,
            is_evaluated=is_evaluated,
        )
        with user_code("your callback"):
            for position, callback in self._callbacks:
                try:
                    getattr(callback, method)(replace(moment, _stop=partial(self._ask, position)))
                except StopIteration as error:
                    raise _not_so(callback, error) from None

    def _ask(self, position: int, reason: str) -> None:
        """Keep that a callback asks to end the run; the first reason counts."""
        self._asked.setdefault(position, " ".join(str(reason).split()) or "no reason given")


def _has(callback: Callback, method: Method) -> bool:
    """Whether the callback does something of its own in this method."""
    return getattr(getattr(callback, method), "__func__", None) is not getattr(Callback, method)


def _not_so(callback: Callback, error: StopIteration) -> UserError:
    """The error for a callback that raises StopIteration, as in some other frameworks."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return UserError(
        f"{frame.filename}:{frame.lineno}: callback {type(callback).__name__} raised StopIteration: to end the run "
        'early, call moment.stop("the reason")'
    )
