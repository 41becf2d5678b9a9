"""Watches the loop: times it, writes what it sees, and says it."""

from __future__ import annotations

import math
import time

from ddp_core.observe.metrics import Console, MetricsWriter
from ddp_core.trainers.batches import Batches, StepBatch
from ddp_core.trainers.signals import StepReport
from ddp_core.trainers.state import TrainState


class Watch:
    """Times the loop and writes what it sees, every few steps; evaluation and saving do not count as training."""

    def __init__(
        self,
        state: TrainState,
        batches: Batches,
        metrics: MetricsWriter,
        console: Console,
        every: int,
        total_steps: int,
    ) -> None:
        self.state, self.batches, self.metrics, self.console = state, batches, metrics, console
        self.every, self.total_steps = every, total_steps
        self.warmed_up = False
        self.window_started = time.perf_counter()
        self.window_samples = 0
        self.window_wait = 0.0
        self.loss = math.nan

    def pause(self, seconds: float) -> None:
        """Leave some seconds out of the window."""
        self.window_started += seconds

    def step_done(self, batch: StepBatch, reports: list[StepReport]) -> None:
        """Count the step; write a record when it is due."""
        self.window_samples += batch.samples
        if reports:
            self.loss = sum(reports[-1].losses) / batch.samples
        if not self.warmed_up:
            # The first step of a process pays for lazy initialisation; it is in no speed.
            self.warmed_up = True
            self._restart()
        elif (batch.step + 1) % self.every == 0:
            self._write(batch)

    def epoch_done(self, batch: StepBatch) -> None:
        """Close the window at the epoch's end."""
        if self.window_samples:
            self._write(batch)

    def evaluated(self, batch: StepBatch) -> None:
        """Write and say the evaluation."""
        state = self.state
        self.metrics.write("evaluation", step=state.step, epoch=batch.epoch, **state.evaluation)
        figures = [f"train loss {state.last_epoch_loss:.4f}"] if state.last_epoch_loss is not None else []
        figures += [f"{name.replace('_', ' ')} {value:.4f}" for name, value in state.evaluation.items()]
        self.console.say(f"epoch {batch.epoch + 1:3d}  step {state.step:6d}  " + "  ".join(figures))

    def _write(self, batch: StepBatch) -> None:
        seconds = time.perf_counter() - self.window_started
        wait = self.batches.wait_seconds - self.window_wait
        state = self.state
        state.trained_seconds += seconds
        state.trained_samples += self.window_samples
        speed = self.window_samples / seconds if seconds > 0 else 0.0
        self.metrics.write(
            "step",
            step=batch.step + 1,
            epoch=batch.epoch,
            loss=self.loss,
            lr=state.optimizer.param_groups[0]["lr"],
            samples_per_second=round(speed, 2),
            data_wait=round(min(1.0, wait / seconds), 5) if seconds > 0 else 0.0,
        )
        self.console.progress(batch.step + 1, self.total_steps, f"loss {self.loss:.4f}")
        self._restart()

    def _restart(self) -> None:
        self.window_samples = 0
        self.window_wait = self.batches.wait_seconds
        self.window_started = time.perf_counter()
