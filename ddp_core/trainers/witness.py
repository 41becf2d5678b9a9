"""A witness of the run: the steps after one of its checkpoints, trained again elsewhere, have the same bits.

Every rank notes what the steps right after a save have made of the state. A fresh process that has nothing of the run
but its record and such a checkpoint trains these steps again, on one process where the run had several: now and then
while the run trains, and before it counts as completed. What differs depends on the layout, is kept in something that
no checkpoint holds, or was computed wrongly.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping

import torch

from ddp_core.base.beneath import read_file
from ddp_core.base.files import replace_file
from ddp_core.checkpoint import find_checkpoints
from ddp_core.observe.step import StepBatch, StepObserver
from ddp_core.trainers.checks import Guard
from ddp_core.trainers.job import Finding, Job, Sums, Testimony
from ddp_core.trainers.noting import first_other, named, state_sums
from ddp_core.trainers.saving import Saving
from ddp_core.trainers.train_state import Steps

NOTED = 2
"""So many steps after a save are noted."""
_APART_SECONDS = 600.0
"""The first witness comes after so many seconds, and others as far apart; only the last one may come sooner."""
_APART_TIMES = 100.0
"""After a witness, at least so many times what it took passes before the next: they take 1 % of the training time."""
NOTES = "noted.json"
"""In the run directory: what the steps after the newest checkpoint with such steps have made."""
_POLL_SECONDS = 2.0
"""Between two messages among ranks that wait for the witness: none may be silent for long."""
_KIND = "witness"


class Witnessed(StepObserver):
    """Notes the steps after each save, and calls the witness; all ranks call the same methods.

    A strict guard waits for a witness of each save before the next one, and so does a run on CUDA, where two trainings
    would take each other's memory. Else the witness trains beside the run, and its answer is looked at in later saves.
    """

    def __init__(self, job: Job, steps: Steps, saving: Saving, guard: Guard) -> None:
        self._job, self._steps, self._saving, self._guard = job, steps, saving, guard
        self._noted: dict[int, dict[int, Sums]] = {}
        """By the step of the checkpoint (rank 0): what the steps after it have made, by their numbers."""
        self._asked = 0
        """The checkpoint of the newest witness (rank 0); 0 where there was none."""
        self._is_awaited = False
        """Whether its answer is still to come."""
        self._due_at = time.monotonic() + _APART_SECONDS
        self._lost: Mapping[int, Sums] | None = None
        """What the interrupted run has noted of the steps after its checkpoint, by their numbers; empty on other ranks.

        None, on all ranks, where there are no such notes.
        """
        self.noted_after, self._reached = 0, 0
        """Steps after later checkpoints than this one are noted, and the last step that was."""
        self._begins_early = False
        """Whether the last witness begins as soon as its checkpoint is written."""

    def go_on(self, is_changed: bool, is_fork: bool) -> None:
        """Compare the next steps with what they made before the run was interrupted, unless it `is_changed` since then.

        A collective, after the state was loaded. Where the run `is_fork` and begins with the checkpoint of its parent,
        which knows nothing of the settings that the fork has changed, the steps after it are not noted.
        """
        step, directory = self._steps.state.step, self._job.run.directory
        lost: dict[int, Sums] = {}
        if is_fork:
            self.noted_after = step
        if self._job.is_first and directory is not None:
            if self._is_on and not is_changed:
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                    noted = json.loads(read_file(directory / NOTES))
                    if noted["checkpoint"] == step:
                        lost = {int(number): dict(sums) for number, sums in noted["after"].items()}
            if not lost:
                with contextlib.suppress(OSError):
                    (directory / NOTES).unlink()  # a later resume may be of what has changed
        self._lost = lost if self._job.collectives.broadcast(bool(lost)) else None

    def _is_to_note(self, step: int, saved: int) -> bool:
        """Whether a fresh process would make this step of the checkpoint and nothing else; the same on all ranks.

        It has no part of a rank that was lost, and evaluates fewer batches at the end of an epoch.
        """
        is_next = step == saved + 1 or step - 1 == self._reached
        steps = self._steps.per_epoch
        return self.noted_after < saved < step <= saved + NOTED and is_next and (step - 1) // steps == saved // steps

    def after_step(self, batch: StepBatch) -> None:
        step, saved = self._steps.state.step, self._saving.newest_step
        if not self._is_on:
            return
        if self._is_to_note(step, saved):
            self._note(step, saved)
            self._begins_early = step == saved + NOTED and self._is_last_noted(step)
        if self._begins_early and self._job.is_first and not self._saving.is_writing():
            # It can train beside the run, so that the end need not wait for all of it.
            self._begins_early = False
            self._ask()

    def _note(self, step: int, saved: int) -> None:
        """Keep what the step has made, and compare it with what it made before an interruption."""
        self._reached = step
        sums: Sums | None = None
        with self._guard.check(_KIND, step):
            sums = state_sums(self._steps.state, self._job.layout.saves_in_parts, self._job.is_first)
        if sums is not None:
            kept = sorted({*self._noted, saved})[-2:]
            self._noted = {at: self._noted.get(at, {}) for at in kept}
            self._noted[saved][step] = sums
            # A witness that begins late, or is slow, would else find its checkpoint removed.
            self._saving.hold({*self._noted, *([self._asked] if self._is_awaited else [])})
        if self._lost is not None:
            with self._guard.check(_KIND, step):
                lost = self._lost.get(step)
                other = None if lost is None or sums is None else first_other({step: lost}, {step: sums}, is_part=False)
                if (names := self._job.collectives.broadcast(other and named(other[1]))) is not None:
                    raise Finding(
                        f"step {step} has made other bits than before the run was interrupted ({names}): something "
                        "that it depends on was changed since then, such as a file, or is in no checkpoint"
                    )
        if sums is not None:
            self._write(saved)

    def _is_last_noted(self, step: int) -> bool:
        """Whether no save is due any more but that of the end, and the run does not wait for its witnesses."""
        saving, end = self._saving, self._steps.total
        is_near = step + self._steps.per_epoch >= end
        return is_near and not self._waits and not any(map(saving.may_save, range(step + 1, end)))

    def _write(self, saved: int) -> None:
        """Let a run that goes on from this checkpoint know what the steps after it have made (rank 0)."""
        if self._job.run.directory is not None:
            text = json.dumps({"checkpoint": saved, "after": self._noted[saved]})
            with contextlib.suppress(OSError):
                replace_file(self._job.run.directory / NOTES, text, root=self._job.run.directory)

    def settle(self, batch: StepBatch) -> None:
        """Before a save, judge what a witness has found, or ask for the next one, where that is due.

        Raises Finding (2), on all ranks, where it has found other bits.
        """
        if self._is_on and self._saving.is_due_now:
            self._hear(stops=batch.stops)

    def end(self) -> None:
        """Have the newest noted steps repeated, and wait for the answer.

        Raises Finding (2), on all ranks, as `settle` does.
        """
        if self._is_on:
            self._hear(is_end=True)
        if self._job.is_first:
            self._saving.let_go()

    @property
    def _is_on(self) -> bool:
        job = self._job
        is_wanted = job.options.rehearsal == "on" and not job.is_tried and not job.run.has_random_data
        return is_wanted and self._guard.checks

    @property
    def _waits(self) -> bool:
        return self._guard.mode == "strict" or self._job.device.type == "cuda"

    def _hear(self, is_end: bool = False, stops: bool = False) -> None:
        """Let rank 0 tell all ranks, message by message, what witnesses have found; a stop waits for none."""
        messages = self._messages(is_end, stops)
        while self._is_on:
            with self._guard.timed(_KIND):
                told = next(messages, None) if self._job.is_first else None
            with self._guard.check(_KIND, self._steps.state.step):
                found = self._job.collectives.broadcast(told)
                if found is None:
                    return
                for said, differs, _ in found:
                    self._guard.figures[_KIND] = said
                    if differs:
                        raise Finding(said)
                    self._job.console.say(f"witness: {said}")

    def _messages(self, is_end: bool, stops: bool) -> Iterator[list[Testimony]]:
        """What witnesses have found; an empty list now and then while one is waited for (rank 0)."""
        job, waits = self._job, is_end or self._waits
        seconds = min(_POLL_SECONDS, job.options.timeout / 4) if waits else 0.0
        while waits and self._saving.is_writing(seconds):  # it may be the checkpoint to repeat from
            yield []
        while True:
            if waits and (stops or job.stop.requested):
                if is_end:
                    yield [Testimony("none: the run was asked to stop")]
                return
            if is_end or self._guard.mode == "strict" or time.monotonic() >= self._due_at:
                self._ask()
            if not self._is_awaited:
                break
            assert job.run.witness is not None
            found = job.run.witness.answer(seconds)
            if found is not None:
                self._is_awaited = False
                self._due_at = time.monotonic() + max(_APART_SECONDS, _APART_TIMES * found.seconds)
            elif not waits:
                return
            yield [] if found is None else [found]
        if is_end and not self._asked:
            yield [Testimony("none: no step came after a save that is still there")]

    def _ask(self) -> None:
        """Have the newest noted steps repeated, unless they were, or a witness is at work (rank 0)."""
        witness, directory = self._job.run.witness, self._job.run.directory
        if self._is_awaited or not self._noted or witness is None or directory is None:
            return
        there = {each.step for each in find_checkpoints(directory / "checkpoints")}
        if (at := max(self._noted.keys() & there, default=0)) > self._asked:
            # The witness needs the memory, if it trains on this device; elsewhere this does nothing.
            torch.cuda.empty_cache()
            witness.ask(at, self._noted[at])
            self._asked, self._is_awaited = at, True
