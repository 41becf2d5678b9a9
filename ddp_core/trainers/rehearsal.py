"""A resume is rehearsed: does the checkpoint, read into a new job, go on as the run did?

What a checkpoint does not hold is lost in silence: a count that an optimizer keeps in `self.t`, a global variable that
a model reads. So after a save a fresh process builds the job anew from the request, in one process on the same kind of
device, reads the checkpoint of step s as a resume does, and makes the update of step s + 1 from the run's own gradient.
Weights, averages, optimizer state and learning rates must then be those of the run, to the last bit. So must the
gradient of one micro-batch of that step, which the new job computes by itself: it shows what the model's forward keeps.
The rest of the global batch is not needed.

Callbacks are not called, as a resume calls none before its first update. The user's code in the new process is heard by
nobody.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ddp_core.base.errors import UserError
from ddp_core.observe.step import StepBatch, StepObserver, StepReport
from ddp_core.trainers.attributes import Attributes
from ddp_core.trainers.cross_check import RANDOM
from ddp_core.trainers.next_step import Facts, Verdict, micro_batch_digest, sums_after_update
from ddp_core.trainers.train_state import TrainState

if TYPE_CHECKING:
    from ddp_core.trainers.trainer import Trainer

_WORTH = 20
"""A run must be predicted to go on for so many times as long as a rehearsal, for one without a suspicion."""
_POLL_SECONDS = 2.0
"""Between two messages among ranks that wait for the verdict: none may be silent for long."""
_KIND = "resume rehearsal"
_NAMED = 3
"""So many of the attributes that a checkpoint lacks are named."""


class Rehearser(Protocol):
    """Makes one rehearsal in a process of its own; used on rank 0."""

    forecast: float
    """How many seconds one is likely to take."""

    def no_room(self, state: TrainState) -> str | None:
        """Why there is not enough memory for a rehearsal; None where there is."""

    def keep(self, gradients: Mapping[str, Tensor]) -> None:
        """Write the gradients of the step; raises OSError."""

    def start(self, facts: Facts) -> None:
        """Start the process; raises OSError."""

    def verdict(self, seconds: float) -> Verdict | None:
        """The verdict, once it is there within so many seconds; the limit of time is a verdict, too."""

    def close(self) -> None:
        """End the process, and remove its files."""


class ResumeRehearsal(StepObserver):
    """Has one resume rehearsed in each attempt at a run, after its first save with a step behind it.

    With `--guard strict` always, and at once. Else at once where an attribute has changed that the checkpoint does not
    hold, and in the background where the run will go on for long. After a live recovery none is made again.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._job, self._guard = trainer, trainer.job, trainer.guard
        self._collectives = trainer.job.collectives
        self._is_first = self._collectives.world.is_first
        self._rehearser = trainer.job.rehearser
        self._is_wanted = self._guard.mode != "off"
        self._way: str | None = None
        """`now` or `background`, once that is chosen, the same on all ranks."""
        self._first_step: int | None = None
        """Of this attempt."""
        self._began = 0.0
        self._step: int | None = None
        """Of the checkpoint that is rehearsed: the next update is watched, or the verdict awaited."""
        self._is_running = False
        self._micro_batch: str | None = None
        self.found: str | None = None
        """What a rehearsal has found in this run, also before a live recovery; None without one."""
        # Of rank 0.
        self._attributes: Attributes | None = None
        self._changed: dict[str, str] = {}
        self._failure: str | None = None
        if self._is_wanted:
            self._record("not rehearsed: no step came after a save")

    def before_step(self, batch: StepBatch) -> None:
        if not (self._is_wanted and self._guard.checks):
            return
        if self._first_step is None:
            self._first_step, self._began = batch.step, time.perf_counter()
            if self._is_first:
                self._attributes = Attributes(self._trainer.state, self._job.callbacks)
        elif self._trainer.saving.newest_step == batch.step > self._first_step:
            with self._trainer.clock.aside("other"), self._guard.check(_KIND, batch.step):
                self._prepare(batch)

    def gradients_done(self, batch: StepBatch, reports: Sequence[StepReport]) -> None:
        if self._step == batch.step:
            with self._trainer.clock.aside("other"), self._guard.check(_KIND, batch.step):
                self._keep(self._trainer.state.ownership.whole_gradients())

    def skipped(self, batch: StepBatch) -> None:
        if self._step == batch.step:
            self._step, self._is_wanted = None, True  # the step after another save will do

    def after_step(self, batch: StepBatch) -> None:
        if self._step is None or not self._guard.checks:
            return
        step = self._trainer.state.step
        if not self._is_running:
            with self._trainer.clock.aside("other"), self._guard.check(_KIND, step):
                self._start()
        if self._way == "now" or self._is_time_up:
            with self._trainer.clock.aside("other"), self._guard.check(_KIND, step):
                self._judge(self._awaited())

    @property
    def _is_time_up(self) -> bool:
        """Whether the run ends, or the next save may remove the checkpoint, or be the second one after it."""
        trainer, saving = self._trainer, self._trainer.saving
        may_save = trainer.is_save_due(trainer.state.step)
        has_saved = saving.newest_step != self._step or self._job.options.keep_last == 1
        return trainer.is_at_end or (may_save and has_saved)

    def _prepare(self, batch: StepBatch) -> None:
        """After the first save: choose whether to rehearse, and keep what is known before the step."""
        self._is_wanted, self._failure = False, None
        if self._way is None:
            choice = self._choose(batch.step, self._attributes) if self._attributes is not None else None
            self._way, reason = self._collectives.broadcast(choice)
            self._record(f"not rehearsed: {reason or 'the run ended before'}")
            if self._way is None and self._guard.mode == "strict":
                self._job.console.say(f"resume not rehearsed: {reason}")
        if self._way is None:
            return
        self._step = batch.step
        if self._attributes is not None:
            self._changed = self._attributes.changed()
        # On every rank, since a forward may be a collective.
        self._micro_batch = micro_batch_digest(self._trainer, batch.step, 0)

    def _choose(self, step: int, attributes: Attributes) -> tuple[str | None, str | None]:
        """How the rehearsal is made, or why there is none (rank 0)."""
        if self.found is not None:
            return None, f"it was {self.found}"
        for callback, name in attributes.kept_by_callbacks():
            self._job.console.warn(
                f"callback {type(callback).__name__} keeps `{name}` in an attribute, which no checkpoint holds: a "
                "resumed run starts with it anew; let its state_dict return it, and load_state_dict take it"
            )
        if self._trainer.checks.has_random_data:
            return None, RANDOM
        if self._rehearser is None:
            return None, "this training was not started from a request, so no other process can build it"
        per_step = (time.perf_counter() - self._began) / (step - (self._first_step or 0))
        remaining = per_step * (self._trainer.total_steps - step)
        if self._guard.mode == "strict" or attributes.lost():
            way = "now"
        elif remaining >= _WORTH * self._rehearser.forecast:
            way = "background"
        else:
            return None, "the run is short, and no attribute has changed that its checkpoints do not hold"
        no_room = self._rehearser.no_room(self._trainer.state)
        return (way, None) if no_room is None else (None, no_room)

    def _keep(self, gradients: dict[str, Tensor] | None) -> None:
        """Before the update: keep its gradient (rank 0)."""
        if not self._is_first or gradients is None:
            return
        if self._trainer.state.scaler is None and not all(each.isfinite().all() for each in gradients.values()):
            self._failure = "a gradient was not finite"
        self._try(lambda rehearser: rehearser.keep(gradients))

    def _start(self) -> None:
        """After the update: let the process begin (rank 0)."""
        assert self._step is not None
        after = sums_after_update(self._trainer.state)
        self._is_running = True
        if self._is_first and after is not None:
            facts = Facts(self._step, self._micro_batch, after, self._way == "background")
            self._try(lambda rehearser: rehearser.start(facts))

    def _try(self, action: Callable[[Rehearser], None]) -> None:
        """Let rank 0's rehearser do something; where it cannot, the verdict will say so."""
        if self._failure is None and self._rehearser is not None:
            try:
                action(self._rehearser)
            except OSError as error:
                self._failure = f"its files cannot be written ({error.strerror})"

    def _awaited(self) -> Verdict:
        """The verdict, on all ranks."""
        while True:
            verdict = self._collectives.broadcast(self._next_verdict() if self._is_first else None)
            if verdict is not None:
                return verdict  # type: ignore[no-any-return]

    def _next_verdict(self) -> Verdict | None:
        if self._failure is not None:
            return Verdict(failed=self._failure)
        if self._job.stop.requested:
            return Verdict(failed="the run was asked to stop")
        assert self._rehearser is not None
        return self._rehearser.verdict(min(_POLL_SECONDS, self._job.options.timeout / 4))

    def _judge(self, verdict: Verdict) -> None:
        """Keep the verdict in the record. Raises UserError, on all ranks, where a resume would not go on."""
        step, self._step = self._step, None
        if self._is_first and self._rehearser is not None:
            self._rehearser.close()
        if verdict.failed is not None:
            self._record(f"not rehearsed: {verdict.failed}")
            return
        self._guard.figures["seconds"][f"{_KIND}, its process"] = verdict.seconds
        result = "the same" if verdict.is_same else "a resume would not continue this run"
        self.found = f"rehearsed at step {step}: {result}"
        self._record(self.found)
        self._job.console.say(f"resume rehearsed at step {step} in {verdict.seconds:.1f} s: {result}")
        if not verdict.is_same:
            # What has changed in the run, and is otherwise in the new job; known on rank 0.
            there = verdict.attributes or {}
            lost = {name: (text, there.get(name, "none")) for name, text in self._changed.items()}
            lost = {name: pair for name, pair in lost.items() if pair[0] != pair[1]}
            raise UserError(_message(step, verdict, self._collectives.broadcast(lost)))

    def _record(self, text: str) -> None:
        self._guard.figures["resume"] = text


def _message(step: int | None, verdict: Verdict, lost: Mapping[str, tuple[str, str]]) -> str:
    said = f"a resume would not continue this run: the checkpoint of step {step}"
    if verdict.unread is not None:
        return f"{said} cannot be read into a new job: {verdict.unread}"
    next_step = (step or 0) + 1
    if verdict.micro_batch_differs:
        found = f"{said}, read into a new job, gives another gradient of micro-batch 0 in step {next_step}"
    else:
        found = f"{said}, read into a new job and given the same gradient, gives other bits in step {next_step}"
        found += f" (first: {verdict.differs})"
    if verdict.micro_batch_differs:
        owners = ["the model's"]
    else:
        owners = ["the optimizer's", "the schedule's"]
        if str(verdict.differs).startswith("the learning rate"):
            owners.reverse()
    # The first owner that has lost something, or else whatever was lost.
    by_owner = [{name: pair for name, pair in lost.items() if name.startswith(owner)} for owner in owners]
    likely = next(filter(None, by_owner), lost)
    if not likely:
        what = "the model's forward reads" if verdict.micro_batch_differs else "the optimizer or the schedule reads"
        return (
            f"{found}. Something that {what} is in no checkpoint, such as a global variable, a variable of a closure, "
            f"or what an object keeps: {_remedy(verdict.micro_batch_differs)}"
        )
    named = [
        f"{name} ({_short(here)} in the run, {_short(there)} after reading)"
        for name, (here, there) in itertools.islice(likely.items(), _NAMED)
    ]
    more = f" and {len(likely) - _NAMED} more" if len(likely) > _NAMED else ""
    lost_ones = ", ".join(named) + more
    return (
        f"{found}. {lost_ones[0].upper()}{lost_ones[1:]} {'are' if len(likely) > 1 else 'is'} in no checkpoint: "
        f"{_remedy(next(iter(likely)).startswith('the model'))}"
    )


def _remedy(of_model: bool) -> str:
    if of_model:
        return "keep it in a buffer, or return it from get_extra_state and take it in set_extra_state"
    return "keep it in `state` or in param_groups, or return it from state_dict and take it in load_state_dict"


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}…"
