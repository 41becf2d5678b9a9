"""A witness of the run: the steps after one of its checkpoints, trained again elsewhere, have the same bits.

Every rank notes what the steps right after a save have made of the state. Before the run counts as completed, a fresh
process that has nothing of it but its record and such a checkpoint trains these steps again, on one process where the
run had several. What differs depends on the layout, or is kept in something that no checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ddp_core.base.errors import UserError
from ddp_core.checkpoint import find_checkpoints
from ddp_core.observe.step import StepBatch, StepObserver
from ddp_core.trainers.noting import Sums, state_sums

if TYPE_CHECKING:
    from ddp_core.trainers.trainer import Trainer

NOTED = 2
"""So many steps after a save are noted."""
_POLL_SECONDS = 2.0
"""Between two messages among ranks that wait for the witness: none may be silent for long."""
_KIND = "witness"


class Testimony(NamedTuple):
    """What a rehearsal or a witness has found."""

    said: str
    """The same bits or which others, or why there was none, in words."""
    differs: bool = False


class Witness(Protocol):
    """Has steps of this run trained again elsewhere; used on rank 0."""

    def ask(self, step: int, noted: Mapping[int, Sums]) -> None:
        """Begin to repeat the steps after the checkpoint of `step`, which have made `noted` of the state."""

    def answer(self, seconds: float) -> Testimony | None:
        """What was found, once that is known within so many seconds."""


class Witnessed(StepObserver):
    """Notes the steps after each save, and calls the witness at the end; all ranks call the same methods."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._job, self._guard = trainer, trainer.job, trainer.guard
        self._is_first = trainer.job.collectives.world.is_first
        self._is_wanted = trainer.job.options.rehearsal == "on" and trainer.job.only_steps is None
        self._noted: dict[int, dict[int, Sums]] = {}
        """By the step of the checkpoint (rank 0): what the steps after it have made, by their numbers."""

    def after_step(self, batch: StepBatch) -> None:
        step, saved = self._trainer.state.step, self._trainer.saving.newest_step
        if not (self._is_wanted and self._guard.checks and 0 < saved < step <= saved + NOTED):
            return
        with self._trainer.clock.aside("other"), self._guard.check(_KIND, step):
            sums = state_sums(self._trainer.state, self._job.layout.saves_in_parts, self._is_first)
        if sums is not None:
            # Of older checkpoints none may be kept any more.
            kept = sorted({*self._noted, saved})[-2:]
            self._noted = {at: self._noted.get(at, {}) for at in kept}
            self._noted[saved][step] = sums

    def end(self) -> None:
        """Have the newest noted steps repeated. Raises UserError, on all ranks, where they have other bits."""
        if not (self._is_wanted and self._guard.checks):
            return
        if self._trainer.checks.has_random_data:
            return
        step = self._trainer.state.step
        self._trainer.saving.wait()
        with self._trainer.clock.aside("other"), self._guard.check(_KIND, step):
            found = self._awaited()
            self._guard.figures[_KIND] = found.said
            if found.differs:
                raise UserError(found.said)
            self._job.console.say(f"witness: {found.said}")

    def _awaited(self) -> Testimony:
        """What the witness has found, on all ranks."""
        witness = self._job.witness
        at = max(self._kept(), default=None)
        if witness is not None and at is not None:
            witness.ask(at, self._noted[at])
        while True:
            found = None
            if self._is_first:
                if witness is None or at is None:
                    found = Testimony("none: no step came after a save")
                elif self._job.stop.requested:
                    found = Testimony("none: the run was asked to stop")
                else:
                    found = witness.answer(min(_POLL_SECONDS, self._job.options.timeout / 4))
            if (told := self._job.collectives.broadcast(found)) is not None:
                return Testimony(*told)

    def _kept(self) -> list[int]:
        """The checkpoints of which steps are noted, as far as they are still there (rank 0)."""
        if not self._noted or self._job.directory is None:
            return []
        there = {each.step for each in find_checkpoints(self._job.directory / "checkpoints")}
        return [at for at in self._noted if at in there]
