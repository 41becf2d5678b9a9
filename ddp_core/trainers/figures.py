"""What training tells while it goes on, to metrics.jsonl and the console: figures, and the digests of its weights."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from ddp_core.base.digests import weights_digest
from ddp_core.observe.step import StepBatch, StepObserver, StepReport
from ddp_core.trainers.clock import StepClock
from ddp_core.trainers.job import Job
from ddp_core.trainers.train_state import Steps


class Figures(StepObserver):
    """Counts losses, samples and seconds of the steps, and writes a record every `log_every` steps.

    Its seconds are those of training: without what the clock keeps aside.
    """

    def __init__(self, job: Job, clock: StepClock, steps: Steps) -> None:
        self._job, self._state, self._clock, self._steps = job, steps.state, clock, steps
        self._is_warm = False
        self.loss = math.nan
        """The mean loss of the newest step that was read."""
        self._start_record()

    def losses_read(self, reports: Sequence[StepReport]) -> None:
        for report in reports:
            loss = report.loss
            if math.isfinite(loss):
                self._state.position.epoch_loss += loss
                self._state.position.epoch_samples += report.divisor
            self.loss = loss / report.divisor

    def after_step(self, batch: StepBatch) -> None:
        self._samples += batch.samples
        self._waited += batch.wait_seconds
        if not self._is_warm:
            # The first step of a process is slow (lazy initialisation), so no speed includes it.
            self._is_warm = True
            self._start_record()
        elif (batch.step + 1) % self._job.options.log_every == 0:
            self._write(batch)
        self._job.console.progress(batch.step + 1, self._steps.total, self.loss)

    def go_on(self, step: int) -> None:
        """Go on after `step` in a process that has trained before; write that step's record, where it is due.

        The process that writes records may have been lost before it could. Nobody knows the speed.
        """
        self._is_warm = True
        self._start_record()
        if step and (step % self._job.options.log_every == 0 or step % self._steps.per_epoch == 0):
            epoch, lr = (step - 1) // self._steps.per_epoch, self._state.learning_rate
            self._job.metrics.write("step", step=step, epoch=epoch, loss=self.loss, lr=lr, samples_per_second=None)

    def epoch_done(self, batch: StepBatch) -> None:
        """Write a record of the steps that no record covers yet, and keep the epoch's mean loss."""
        if self._samples:
            self._write(batch)
        self._state.position.end_epoch()

    def _write(self, batch: StepBatch) -> None:
        seconds = time.perf_counter() - self._began - (self._clock.seconds_aside - self._aside_before)
        state = self._state
        state.position.trained_seconds += seconds
        state.position.trained_samples += self._samples
        speed = self._samples / seconds if seconds > 0 else 0.0
        self._job.metrics.write(
            "step",
            step=batch.step + 1,
            epoch=batch.epoch,
            loss=self.loss,
            lr=state.learning_rate,
            samples_per_second=round(speed, 2),
            data_wait=round(min(1.0, self._waited / seconds), 5) if seconds > 0 else 0.0,
        )
        self._start_record()

    def _start_record(self) -> None:
        """Count samples and seconds from here on for the next record."""
        self._samples, self._waited = 0, 0.0
        self._aside_before = self._clock.seconds_aside
        self._began = time.perf_counter()


class WeightDigests(StepObserver):
    """Writes the digest of the weights (rank 0) at the end of an epoch, and every `digest_every` steps."""

    def __init__(self, job: Job, clock: StepClock, steps: Steps) -> None:
        self._job, self._clock, self._steps = job, clock, steps

    def settle(self, batch: StepBatch) -> None:
        every, state = self._job.options.digest_every, self._steps.state
        if not self._steps.ends_epoch and (every is None or state.step % every):
            return
        with self._clock.aside("other"):
            weights = state.ownership.whole_weights()
            if self._job.is_first and weights is not None:
                self._job.metrics.write("digest", step=state.step, weights_sha256=weights_digest(weights))
