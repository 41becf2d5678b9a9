"""Counts losses, samples and seconds of the loop, writes them to the metrics, and prints them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_core.observe.metrics import Console, MetricsWriter
from ddp_core.observe.step import StepBatch, StepObserver, StepReport
from ddp_core.trainers.clock import StepClock
from ddp_core.trainers.train_state import TrainState


def in_words(figures: Mapping[str, Any]) -> list[str]:
    """The figures that are single numbers, for people: 'test loss 0.1234'."""
    return [
        f"{name.replace('_', ' ')} {value:.4f}" if isinstance(value, float) else f"{name.replace('_', ' ')} {value}"
        for name, value in figures.items()
        if isinstance(value, int | float)
    ]


class Watch(StepObserver):
    """Counts every step, and writes a record every `every` steps; time that the clock keeps aside is not training."""

    def __init__(
        self,
        state: TrainState,
        clock: StepClock,
        metrics: MetricsWriter,
        console: Console,
        every: int,
        total_steps: int,
    ) -> None:
        self.state, self.clock, self.metrics, self.console = state, clock, metrics, console
        self.every, self.total_steps = every, total_steps
        self.warmed_up = False
        self.loss = math.nan
        self._restart()

    def gradients_done(self, batch: StepBatch, reports: Sequence[StepReport]) -> None:
        for report in reports:
            loss = report.loss
            if math.isfinite(loss):
                self.state.epoch_loss += loss
                self.state.epoch_samples += report.samples
            self.loss = loss / report.samples

    def after_step(self, batch: StepBatch) -> None:
        self.window_samples += batch.samples
        self.window_wait += batch.wait_seconds
        if not self.warmed_up:
            # The first step of a process is slow (lazy initialisation), so no speed includes it.
            self.warmed_up = True
            self._restart()
        elif (batch.step + 1) % self.every == 0:
            self._write(batch)
        self.console.progress(batch.step + 1, self.total_steps, self.loss)

    def epoch_done(self, batch: StepBatch) -> None:
        """Write a record of the steps that no record covers yet."""
        if self.window_samples:
            self._write(batch)

    def evaluated(self, batch: StepBatch) -> None:
        """Write the evaluation to the metrics and print it."""
        state = self.state
        self.metrics.write("evaluation", step=state.step, epoch=batch.epoch, **state.evaluation)
        figures = [f"train loss {state.last_epoch_loss:.4f}"] if state.last_epoch_loss is not None else []
        figures += in_words(state.evaluation)
        self.console.say(f"epoch {batch.epoch + 1:3d}  step {state.step:6d}  " + "  ".join(figures))

    def _write(self, batch: StepBatch) -> None:
        seconds = time.perf_counter() - self.window_started - (self.clock.seconds_aside - self.window_aside)
        state = self.state
        state.trained_seconds += seconds
        state.trained_samples += self.window_samples
        speed = self.window_samples / seconds if seconds > 0 else 0.0
        self.metrics.write(
            "step",
            step=batch.step + 1,
            epoch=batch.epoch,
            loss=self.loss,
            lr=state.learning_rate,
            samples_per_second=round(speed, 2),
            data_wait=round(min(1.0, self.window_wait / seconds), 5) if seconds > 0 else 0.0,
        )
        self._restart()

    def _restart(self) -> None:
        self.window_samples = 0
        self.window_wait = 0.0
        self.window_aside = self.clock.seconds_aside
        self.window_started = time.perf_counter()
