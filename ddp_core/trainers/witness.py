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
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from ddp_core.base.beneath import read_file
from ddp_core.base.errors import UserError
from ddp_core.base.files import replace_file
from ddp_core.checkpoint import find_checkpoints
from ddp_core.observe.step import StepBatch, StepObserver
from ddp_core.trainers.noting import Sums, first_other, named, state_sums

if TYPE_CHECKING:
    from ddp_core.trainers.trainer import Trainer

NOTED = 2
"""So many steps after a save are noted."""
_FIRST_SECONDS = 600.0
"""A run has trained so long before it has a witness that is not its last one."""
_TIMES = 100.0
"""So many times what a witness took must pass before the next one: together they take 1 % of the training time."""
NOTES = "noted.json"
"""In the run directory: what the steps after the newest checkpoint with such steps have made."""
_POLL_SECONDS = 2.0
"""Between two messages among ranks that wait for the witness: none may be silent for long."""
_KIND = "witness"


class Testimony(NamedTuple):
    """What came of a rehearsal or a witness: whether steps that were trained again have the same bits."""

    said: str
    """The same bits or which others, or why there was none, in words."""
    differs: bool = False
    seconds: float = 0.0
    """How long it took."""


class Witness(Protocol):
    """Has steps of this run trained again elsewhere; used on rank 0."""

    def ask(self, step: int, noted: Mapping[int, Sums]) -> None:
        """Begin to repeat the steps after the checkpoint of `step`, which have made `noted` of the state."""

    def answer(self, seconds: float) -> Testimony | None:
        """What was found, once that is known within so many seconds."""


class Witnessed(StepObserver):
    """Notes the steps after each save, and calls the witness; all ranks call the same methods.

    A strict guard waits for a witness of each save before the next one, and so does a run on CUDA, where two trainings
    would take each other's memory. Else the witness trains beside the run, and its answer is looked at in later saves.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._job, self._guard = trainer, (job := trainer.job), trainer.guard
        self._is_first = job.collectives.world.is_first
        self._is_wanted = job.options.rehearsal == "on" and not job.is_tried and not job.has_random_data
        self._waits = trainer.guard.mode == "strict" or trainer.device.type == "cuda"
        self._noted: dict[int, dict[int, Sums]] = {}
        """By the step of the checkpoint (rank 0): what the steps after it have made, by their numbers."""
        self._asked: int | None = None
        """The checkpoint of the newest witness (rank 0)."""
        self._is_asked = False
        """Whether its answer is still to come."""
        self._saves, self._due_save, self._due_at = 0, 1, time.monotonic() + _FIRST_SECONDS
        self._lost: Mapping[int, Sums] = {}
        """What the interrupted run has noted of the steps after its checkpoint, by their numbers (rank 0)."""
        self._after, self._reached = 0, 0
        """Steps after later checkpoints than this one are noted, and the last step that was."""
        self._compares = False
        """Whether rank 0 has such notes; the same on all ranks."""

    def go_on(self, is_changed: bool, is_fork: bool) -> None:
        """Compare the next steps with what they made before the run was interrupted, unless it `is_changed` since then.

        A collective, after the state was loaded. Where the run `is_fork` and begins with the checkpoint of its parent,
        which knows nothing of the settings that the fork has changed, the steps after it are not noted.
        """
        step, directory = self._trainer.state.step, self._job.directory
        if is_fork:
            self._after = step
        if self._is_first and directory is not None:
            if self._is_on and not is_changed:
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                    noted = json.loads(read_file(directory / NOTES))
                    if noted["checkpoint"] == step:
                        self._lost = {int(number): dict(sums) for number, sums in noted["after"].items()}
            if not self._lost:
                with contextlib.suppress(OSError):
                    (directory / NOTES).unlink()  # a later resume may be of what has changed
        self._compares = bool(self._job.collectives.broadcast(bool(self._lost)))

    def _is_to_note(self, step: int, saved: int) -> bool:
        """Whether a fresh process would make this step of the checkpoint and nothing else; the same on all ranks.

        It has no part of a rank that was lost, and evaluates fewer batches at the end of an epoch.
        """
        is_next = step == saved + 1 or step - 1 == self._reached
        is_same_epoch = (step - 1) // self._trainer.steps_per_epoch == saved // self._trainer.steps_per_epoch
        return self._after < saved < step <= saved + NOTED and is_next and is_same_epoch

    def after_step(self, batch: StepBatch) -> None:
        step, saved = self._trainer.state.step, self._trainer.saving.newest_step
        if not (self._is_on and self._is_to_note(step, saved)):
            return
        self._reached = step
        with self._guard.check(_KIND, step):
            sums = state_sums(self._trainer.state, self._job.layout.saves_in_parts, self._is_first)
        if sums is not None:
            # Older checkpoints may be gone by now.
            kept = sorted({*self._noted, saved})[-2:]
            self._noted = {at: self._noted.get(at, {}) for at in kept}
            self._noted[saved][step] = sums
        if self._compares:
            with self._guard.check(_KIND, step):
                lost = self._lost.get(step) if self._is_first else None
                other = None if lost is None or sums is None else first_other({step: lost}, {step: sums}, is_part=False)
                if (names := self._job.collectives.broadcast(other and named(other[1]))) is not None:
                    raise UserError(
                        f"step {step} has made other bits than before the run was interrupted ({names}): something "
                        "that it depends on was changed since then, such as a file, or is in no checkpoint"
                    )
        if sums is not None:
            self._write(saved)
            if step == saved + NOTED and self._is_last_noted(step):
                # It can train beside the run, so that the end need not wait for all of it.
                self._ask(max(self._kept(), default=None))

    def _is_last_noted(self, step: int) -> bool:
        """Whether no save is due any more but that of the end, and the run does not wait for its witnesses."""
        trainer, end = self._trainer, self._trainer.total_steps
        is_near = step + trainer.steps_per_epoch >= end
        return is_near and not self._waits and not any(map(trainer.is_save_due, range(step + 1, end)))

    def _ask(self, at: int | None) -> bool:
        """Ask for a witness from this checkpoint, unless one is under way, was so last, or nobody could (rank 0)."""
        if self._is_asked or at is None or at == self._asked or self._job.witness is None:
            return self._is_asked
        # The witness needs the memory, if it trains on this device; elsewhere this does nothing.
        torch.cuda.empty_cache()
        self._job.witness.ask(at, self._noted[at])
        self._asked, self._is_asked = at, True
        return True

    def _write(self, saved: int) -> None:
        """Let a run that goes on from this checkpoint know what the steps after it have made (rank 0)."""
        if self._job.directory is not None:
            text = json.dumps({"checkpoint": saved, "after": self._noted[saved]})
            with contextlib.suppress(OSError):
                replace_file(self._job.directory / NOTES, text, root=self._job.directory)

    def before_save(self) -> None:
        """Judge what a witness has found, or ask for the next one, where that is due.

        Raises UserError (2), on all ranks, where it has found other bits.
        """
        if self._is_on:
            self._saves += 1
            if self._guard.mode == "strict":
                self._trainer.saving.wait()  # the checkpoint to repeat from may be under way
            self._hear(is_end=False)

    def end(self) -> None:
        """Have the newest noted steps repeated, and wait for that. Raises UserError (2), on all ranks, as before."""
        if self._is_on:
            self._trainer.saving.wait()
            self._hear(is_end=True)

    @property
    def _is_on(self) -> bool:
        return self._is_wanted and self._guard.checks

    def _hear(self, is_end: bool) -> None:
        while self._is_on:
            with self._guard.check(_KIND, self._trainer.state.step):
                told = self._next(is_end) if self._is_first else None
                found, is_more = self._job.collectives.broadcast(told)
                if found is not None:
                    said, differs, _ = found
                    self._guard.figures[_KIND] = said
                    if differs:
                        raise UserError(said)
                    self._job.console.say(f"witness: {said}")
            if not is_more:
                return

    def _next(self, is_end: bool) -> tuple[Testimony | None, bool]:
        """What a witness has found by now, and whether all ranks ask again at once (rank 0)."""
        witness, waits = self._job.witness, is_end or self._waits
        if waits and self._job.stop.requested:
            return Testimony("none: the run was asked to stop") if is_end else None, False
        if not self._is_asked:
            is_late = time.monotonic() >= self._due_at and self._saves >= self._due_save
            is_due = is_late or self._guard.mode == "strict"
            at = max(self._kept(), default=None) if is_end or is_due else None
            if not self._ask(at):
                none = is_end and self._asked is None
                return Testimony("none: no step came after a save that is still there") if none else None, False
        assert witness is not None
        found = witness.answer(min(_POLL_SECONDS, self._job.options.timeout / 4) if waits else 0.0)
        if found is not None:
            self._is_asked = False
            self._due_at, self._due_save = time.monotonic() + _TIMES * found.seconds, 2 * self._saves
        return found, waits and (found is None or is_end)

    def _kept(self) -> list[int]:
        """The checkpoints of which steps are noted, as far as they are still there (rank 0)."""
        if not self._noted or self._job.directory is None:
            return []
        there = {each.step for each in find_checkpoints(self._job.directory / "checkpoints")}
        return [at for at in self._noted if at in there]
