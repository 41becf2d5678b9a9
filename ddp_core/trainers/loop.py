"""The training loop of every layout: for each batch gradients, update, count; and observers are told each moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddp_core.base.errors import UserError
from ddp_core.base.keyed_draws import without_key
from ddp_core.distributed.stop import ASKED_ELSEWHERE, Regroup, Stopped
from ddp_core.observe.step import StepBatch, StepObserver, StepReport
from ddp_core.reduction.watching import DependsOnLayout
from ddp_core.trainers.passes import WeightUpdate
from ddp_core.trainers.strategy import Strategy
from ddp_core.trainers.train_state import Steps


@dataclass(eq=False)
class Loop:
    """Trains the state of a strategy to the end of its steps.

    Nothing but the strategy, the update and the observers touches the weights; `ddp_core.trainers.assemble` says in
    which order the observers are told. Every rank makes the same steps, and meets the same end.
    """

    strategy: Strategy
    update: WeightUpdate
    steps: Steps
    observers: StepObserver
    end_or_skip: Callable[[StepReport, int], None]
    """What is done where a loss is not finite, and after how many steps it was read."""

    def fit(self) -> None:
        """Train from `state.step` to the end. Raises Stopped, UserError, or what the model raised.

        Raises Regroup where this rank leaves its group to let another one in.
        """
        strategy, observers = self.strategy, self.observers
        state, losses, job = strategy.state, strategy.losses, strategy.job
        observers.begin()
        strategy.clock.restart()  # what ranks have waited for each other until now is no training
        if not state.is_settled:  # a rank was lost after the update, in a live recovery
            strategy.seeds.update(state.step - 1)
            self._settle(strategy.batches.done(state.step - 1))
        end = state.step if self.steps.are_done else self.steps.total
        # After an error the device may wait for a lost peer. So the device is freed first, and only then is closed what
        # may wait for the device: the thread that loads batches, and what the caller closes.
        with (
            contextlib.closing(strategy.batches.starting_at(state.step, end)) as batches,
            job.collectives.abandoned_on_error(),
            without_key(),
        ):
            for batch in batches:
                observers.before_step(batch)
                self._compute_gradients(batch)
                leaves, reports = losses.receive(batch)
                batch.stops = leaves and any(job.collectives.gather(job.stop.requested))
                strategy.seeds.update(batch.step)
                are_finite = self._are_finite(reports, batch.step + 1)
                observers.gradients_done(batch, reports)
                if are_finite:
                    self.update.make(batch.step)
                else:
                    observers.skipped(batch)
                state.step += 1
                state.mark(is_settled=False)
                observers.after_step(batch)
                self._settle(batch)
                if self.steps.are_done:
                    break
                if batch.stops:
                    job.stop.saved()
                    raise Stopped(job.stop.reason or ASKED_ELSEWHERE, state.step)
                # Ranks leave to let another one in; a stop that is asked for meanwhile is met after one more step.
                if leaves and not any(job.collectives.gather(job.stop.requested)):
                    raise Regroup
            observers.end()
        observers.ended()

    def _compute_gradients(self, batch: StepBatch) -> None:
        try:
            self.strategy.compute_gradients(batch)
        except DependsOnLayout as error:
            raise UserError(f"{self.strategy.where}: {error}") from None
        except Exception as error:
            from ddp_core.trainers.torch_errors import note_step

            note_step(error, batch)
            raise

    def _settle(self, batch: StepBatch) -> None:
        """Do what follows an update."""
        state = self.strategy.state
        self.observers.step_done(batch)
        if self.steps.ends_epoch:
            self._are_finite(self.strategy.losses.read(), state.step)
            self.observers.epoch_done(batch)
        self.observers.settle(batch)
        # On another rank the step stays unsettled: rank 0 may be lost before it has written what follows from it.
        if self.strategy.job.is_first:
            state.mark()

    def _are_finite(self, reports: Sequence[StepReport], done: int) -> bool:
        """Tell of the losses that are read now, after the gradients of `done` steps; then judge whether all are finite.

        Raises UserError (5) unless such steps are skipped, also in the place of what an observer has raised at them.
        """
        bad = next((report for report in reports if not report.is_finite), None)
        try:
            if reports:
                self.observers.losses_read(reports)
        finally:
            if bad is not None:
                self.end_or_skip(bad, done)
        return bad is None
