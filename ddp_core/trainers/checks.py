"""What the guard checks in the steps of a trainer, and when."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddp_core.base.errors import UserError
from ddp_core.data.data_digest import ADVICE
from ddp_core.observe.step import StepBatch, StepReport
from ddp_core.trainers.between_updates import BetweenUpdates, OwnPart
from ddp_core.trainers.cross_check import RANDOM, CrossCheck
from ddp_core.trainers.device_memory import DeviceMemory
from ddp_core.trainers.guard import Guard
from ddp_core.trainers.read_twice import ReadTwice
from ddp_core.trainers.same_state import require_same_state
from ddp_core.trainers.step_losses import first_bad

if TYPE_CHECKING:
    from ddp_core.trainers.trainer import Trainer


class Checks:
    """The checks of one trainer, in the sequence of a step; all ranks call the same methods.

    All of them raise UserError, on every rank, as `Guard.check` says.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._job = trainer, trainer.job
        self.guard = Guard(trainer.job)
        self.has_random_data = trainer.job.has_random_data
        # A CUDA graph replays its kernels without the hooks by which gradients are watched.
        can_check = self.guard.checks and not self._job.options.cuda_graph
        self.cross_check = CrossCheck(trainer, self.guard.mode == "strict") if can_check else None
        if self._job.options.cuda_graph:
            self.guard.figures["not computed again"] = "a CUDA graph replays without the hooks that watch gradients"
        elif self.has_random_data:
            self.guard.figures["not computed again"] = RANDOM
        self.read_twice = ReadTwice(trainer.batches) if self._job.on_random_data is not None else None
        self._memory = DeviceMemory(trainer.job.collectives)
        self._began_at = 0
        self._has_evaluated = False
        self.changed: list[str] = []
        """The parameters that something has written to since the last update, on this rank."""

    def begin(self) -> None:
        """Before the first step of a training."""
        trainer = self._trainer
        self._began_at = trainer.state.step
        self._between_updates, self._own_part = BetweenUpdates(trainer.model), OwnPart(trainer.state.ownership)

    def begin_step(self) -> None:
        """Before a step, when callbacks have been called."""
        self.changed = self._between_updates.changed() if self._trainer.exact else []

    def begin_gradients(self, batch: StepBatch) -> None:
        """Before the first forward of a step."""
        if self.cross_check is not None and self.guard.checks:
            self.cross_check.begin(batch, before_save=self._trainer.is_save_due(batch.step + 1))

    def gradients_done(self, batch: StepBatch, reports: Sequence[StepReport], changed_on: int) -> None:
        """Before the update; something was written to since the last one on `changed_on` ranks."""
        if 0 < changed_on < self._job.collectives.world.world_size and self.guard.checks:
            with self.guard.check("same state", batch.step):
                self._require_same_changes(self.changed)
        if self.cross_check is not None and self.cross_check.is_under_way and first_bad(reports) is None:
            with self._trainer.clock.aside("other"), self.guard.check("cross-check", batch.step + 1):
                self.cross_check.finish(batch)
            self.guard.figures |= {"checks": self.cross_check.checks, "every": self.cross_check.every}

    def updated(self) -> None:
        """Right after the update, before any code of the user's runs."""
        self._between_updates.updated()
        step = self._trainer.state.step
        if self.guard.checks and self.compares_after(step):
            self._own_part.updated(step)

    def step_done(self, batch: StepBatch) -> None:
        """At the end of a step, before it is saved."""
        if self.compares_after(self._trainer.state.step):
            self._tell_of_random_data(batch)
            self._require_memory()
            self.require_same_state()

    def before_evaluation(self) -> None:
        """Evaluate one batch twice before the first evaluation: the figures must be the same. It leaves no trace.

        What differs would also be another figure on each layout, where other ranks evaluate other batches.
        """
        if self._has_evaluated or not self.guard.checks:
            return
        self._has_evaluated = True
        with self.guard.check("evaluation", self._trainer.state.step):
            figures, again = self._trainer.first_evaluation_batch_twice()
            for name, value in figures.items():
                if repr(value) != repr(again[name]):
                    raise UserError(
                        f"{name} is {value} for the first evaluation batch, and {again[name]} when it is evaluated "
                        "again: the model, the loss or a metric draws from a random generator of its own, reads a "
                        "clock, or keeps something; let it follow from weights and samples alone, or go on with "
                        "--on-difference warn"
                    )

    def watched(self, index: int, spot: int = 0) -> contextlib.AbstractContextManager[None]:
        """Run the micro-batch `index` inside; its gradients are noted where it will be computed again."""
        return contextlib.nullcontext() if self.cross_check is None else self.cross_check.watch(index, spot)

    def compares_after(self, steps: int) -> bool:
        """Whether processes compare after so many steps what they have alike.

        After each epoch and before each save; also after 1, 2, 4, 8, … steps of this start, to see it soon.
        """
        return (steps - self._began_at).bit_count() == 1 or self._trainer.is_save_due(steps)

    def require_same_state(self) -> None:
        """Compare what all ranks have alike, and what a rank owns alone with what the update has left there."""
        trainer, step = self._trainer, self._trainer.state.step
        if self.guard.checks:
            with trainer.clock.aside("other"), self.guard.check("same state", step):
                self.compare_states(f"after step {step}")
                if not trainer.state.ownership.has_whole_weights:
                    self._require_same_changes(self._between_updates.changed())
                self._own_part.require_same(step, self._job.collectives, self._so)

    def _require_memory(self) -> None:
        if self.guard.checks and self._trainer.device.type == "cuda":
            step = self._trainer.state.step
            with self.guard.check("device memory", step):
                if (warning := self._memory.require_enough(step)) is not None:
                    self._job.console.say(warning)

    def compare_states(self, when: str) -> None:
        """Raises UserError for the first tensor that the ranks do not have alike."""
        require_same_state(self._trainer.state, self._job.collectives, when, self._so)

    def take_random_data(self, found: str) -> None:
        """Warn, and record, that samples came out differently when they were read again.

        Once, and not where that was known before training. Raises UserError (2) where the guard is strict.
        """
        self.has_random_data, self.guard.figures["not computed again"] = True, RANDOM
        if self.read_twice is None or self.read_twice.is_over:
            return
        self.read_twice.stop()
        words = f"{found}, so no result can be repeated to the bit; {ADVICE}"
        if self.guard.mode == "strict":
            raise UserError(words)
        if self._job.collectives.world.is_first and self._job.on_random_data is not None:
            self._job.on_random_data(found)
        self._job.console.say(f"warning: {words}")

    @property
    def _so(self) -> str:
        """What comes of a state that is not the same on all ranks, in words."""
        stops = self._job.options.on_difference == "stop"
        newest = self._trainer.saving.newest
        return f"this step is not saved, {newest}" if stops else "the ranks train other models now"

    def _require_same_changes(self, changed: list[str]) -> None:
        """Compare what was `changed` since the last update with the other ranks."""
        collectives, are_whole = self._job.collectives, self._trainer.state.ownership.has_whole_weights
        self._between_updates.require_same(changed, collectives, are_whole, self._trainer.where)

    def _tell_of_random_data(self, batch: StepBatch) -> None:
        """Warn, and record, where samples of any rank were others when they were read again."""
        if self.read_twice is None or not self.read_twice.is_on(batch.epoch):
            return
        findings = self._job.collectives.gather(self.read_twice.finding)
        if (found := next(filter(None, findings), None)) is not None:
            self.take_random_data(found)
