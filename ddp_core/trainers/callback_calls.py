"""Calls the user's callbacks, and lets all ranks agree where one of them asks to end the run.

Only this file calls the callbacks.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from ddp_core.base.errors import UserError
from ddp_core.base.user_code import user_code
from ddp_core.checkpoint.state import in_host_memory
from ddp_core.observe.callback import Callback, Moment
from ddp_core.observe.step import StepBatch, StepObserver, StepReport, overrides
from ddp_core.trainers.clock import StepClock
from ddp_core.trainers.job import Job
from ddp_core.trainers.train_state import Steps

Method = Literal["on_step", "on_epoch", "on_end"]


class EndRequest(NamedTuple):
    """A callback has asked to end the run."""

    reason: str
    name: str
    """The name of its class."""
    of_all: bool
    """Whether every rank calls it, so that every rank must ask."""


@dataclass
class CallbackProgress:
    """What the callbacks of a rank have been told last, and what they want to be kept after it."""

    step: int = -1
    methods: set[Method] = field(default_factory=set)
    """Those that were called after this step."""
    asked: dict[int, EndRequest] = field(default_factory=dict)
    """The callbacks that have asked to end the run after it, by their positions."""
    states: dict[str, Any] = field(default_factory=dict)


def newest_told(told: Iterable[CallbackProgress | None], step: int) -> CallbackProgress | None:
    """The newest of what the ranks of a live recovery know was `told` up to `step`; None where they know nothing."""
    known = (each for each in told if each is not None and each.step <= step)
    return max(known, key=lambda each: (each.step, len(each.methods)), default=None)


class CallbackCalls(StepObserver):
    """Calls the callbacks of this rank, each method once for each step, also in a live recovery.

    For that, rank 0 lets the others know after each step of a live recovery what its callbacks have been told.
    """

    def __init__(self, job: Job, steps: Steps, clock: StepClock) -> None:
        self._job, self._steps, self._clock = job, steps, clock
        self._callbacks = [
            (position, callback)
            for position, callback in enumerate(job.parts.callbacks)
            if job.is_first or callback.ranks == "all"
        ]
        self._loss: float | None = None
        self._methods: set[Method] = set()
        """In which methods a callback of any rank may ask to end the run."""
        self._told = CallbackProgress()
        self._first_has_any = False
        self._shared: CallbackProgress | None = None
        """What rank 0 has let this rank know."""

    def begin(self) -> None:
        """Learn in which methods ranks must ask each other."""
        methods: tuple[Method, ...] = ("on_step", "on_epoch")
        own = {method for _, callback in self._callbacks for method in methods if overrides(callback, Callback, method)}
        # A list of callbacks may differ between ranks.
        by_rank = self._job.collectives.gather((own, bool(self._callbacks)))
        self._methods = set().union(*(own for own, _ in by_rank))
        self._first_has_any = by_rank[0][1]

    def told(self) -> CallbackProgress | None:
        """What another process needs to know to call the callbacks in the place of rank 0."""
        if not self._job.is_first or not self._callbacks:
            return self._shared
        states = in_host_memory(self._steps.state.states_of_callbacks(), self._job.device)
        return replace(self._told, states=states)

    def take_over(self, told: CallbackProgress | None, loss: float) -> None:
        """Go on after what the callbacks were told last; `loss` is that of the newest step."""
        self._loss, self._shared = loss, told
        if told is not None:
            self._told = replace(told, methods=set(told.methods))  # `told` stays what rank 0 has been told

    def before_step(self, batch: StepBatch) -> None:
        self._loss = None

    def losses_read(self, reports: Sequence[StepReport]) -> None:
        self._loss = reports[-1].loss / reports[-1].divisor

    def after_step(self, batch: StepBatch) -> None:
        self._call("on_step", batch.epoch, self._loss)

    def step_done(self, batch: StepBatch) -> None:
        # In a live recovery rank 0 may have been lost before it called them.
        self._call("on_step", batch.epoch, self._loss)
        self._agree_to_end("on_step")

    def epoch_done(self, batch: StepBatch) -> None:
        with self._clock.aside():
            is_evaluated = self._steps.state.is_evaluated
            self._call("on_epoch", batch.epoch, self._steps.state.position.last_epoch_loss, is_evaluated)
            self._agree_to_end("on_epoch")

    def settle(self, batch: StepBatch) -> None:
        # Nothing is told of this step any more, whatever happens while it is saved.
        if self._first_has_any:
            self._shared = self._job.collectives.to_successors(self.told)

    def ended(self) -> None:
        self._call("on_end", self._steps.last_epoch, self._steps.state.position.last_epoch_loss)

    def _agree_to_end(self, method: Method) -> None:
        """End the run here, on every rank, where a callback has asked for it in this method; called by all ranks.

        Ranks ask each other only where the experiment has a callback with this method. Raises UserError, on every
        rank, where a callback of all ranks has asked on some of them alone: another layout would go on.
        """
        if method not in self._methods or self._steps.are_done:
            return
        collectives, asked = self._job.collectives, self._told.asked
        if not collectives.sum_(torch.tensor([float(bool(asked))])).item():
            return
        by_rank: list[dict[int, EndRequest]] = collectives.gather(asked)
        for position, one in sorted({place: each for asks in by_rank for place, each in asks.items()}.items()):
            ranks = [rank for rank, asks in enumerate(by_rank) if position in asks]
            if one.of_all and len(ranks) < len(by_rank):
                raise UserError(
                    f"after step {self._steps.state.step}, callback {one.name} asked to end the run on "
                    f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {len(by_rank)} alone "
                    f"({one.reason}), so another layout would go on: let it look at what all ranks have alike, such as "
                    'moment.loss and moment.evaluation; or with ranks = "first" rank 0 asks for all'
                )
        self._steps.state.position.ended_early = by_rank[0][min(by_rank[0])].reason

    def _call(self, method: Method, epoch: int, loss: float | None, is_evaluated: bool = False) -> None:
        state, directory = self._steps.state, self._job.run.directory
        if state.step != self._told.step:
            self._told = CallbackProgress(state.step)
        if not self._callbacks or method in self._told.methods:
            return
        assert directory is not None, "callbacks are called in a run directory"
        moment = Moment(
            step=state.step,
            epoch=epoch,
            loss=loss,
            learning_rate=state.learning_rate,
            evaluation=state.position.evaluation,
            model=state.model,
            averaged_model=None if state.average is None else state.average.module,
            rank=self._job.collectives.world.rank,
            directory=directory,
            is_evaluated=is_evaluated,
            rehearsal=self._job.is_tried,
        )
        with user_code("your callback"):
            for position, callback in self._callbacks:
                try:
                    getattr(callback, method)(replace(moment, _stop=partial(self._ask, position, callback)))
                except StopIteration as error:  # as in some other frameworks
                    frame = traceback.extract_tb(error.__traceback__)[-1]
                    raise UserError(
                        f"{frame.filename}:{frame.lineno}: callback {type(callback).__name__} raised StopIteration: to "
                        'end the run early, call moment.stop("the reason")'
                    ) from None
        self._told.methods.add(method)

    def _ask(self, position: int, callback: Callback, reason: str) -> None:
        """Keep that a callback asks to end the run; its first reason counts."""
        words = " ".join(str(reason).split()) or "no reason given"
        self._told.asked.setdefault(position, EndRequest(words, type(callback).__name__, callback.ranks == "all"))
