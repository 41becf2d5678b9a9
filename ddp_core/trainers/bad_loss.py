"""What is done where a loss is NaN or infinite: the run ends before the update, or the step is skipped.

A forward changes buffers, such as batch-norm statistics, before anybody knows whether its step counts.
"""

from __future__ import annotations

import math

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.observe.step import StepBatch, StepObserver, StepReport
from ddp_core.trainers.batches import Batches
from ddp_core.trainers.job import Job
from ddp_core.trainers.saving import Saving
from ddp_core.trainers.train_state import TrainState


def end_or_skip(job: Job, batches: Batches, saving: Saving, report: StepReport, done: int) -> None:
    """Raise UserError (5) for the report of such a loss, or say that its step is skipped, where that was asked for.

    It was read after the gradients of `done` steps. The line names the first such micro-batch, its rank or replica, and
    up to 16 sample ids.
    """
    parts = batches.cut.parts(report.samples)
    first = next((part for part in parts if not math.isfinite(report.losses[part.index])), None)
    if first is None:  # each is finite, but not their sum
        named = f"the loss is not finite at step {report.step + 1}"
    else:
        owner, layout = batches.owner(report.step, first.index), job.layout
        place = f"replica {owner}" if layout.kind == "dp" else f"rank {owner} (node {owner // layout.nproc_per_node})"
        ids = ", ".join(str(number) for number in batches.ids(report.step, first)[:16])
        named = f"loss is {report.losses[first.index]} at step {report.step + 1} on {place}, sample ids {ids}"
    if job.options.on_nan == "skip":
        job.console.say(f"{named}; step skipped")
        return
    seen = f" (seen after step {done}, no update was made since)" if done > report.step + 1 else ""
    raise UserError(
        f"{named}; stopped before the optimizer step{seen}, {saving.newest}: look at these samples, lower "
        "optimizer.lr, or use --on-nan skip",
        ExitCode.NUMERICS,
    )


class BufferCopies(StepObserver):
    """Keeps the buffers of each step's beginning; they come back where the step is skipped, or dropped."""

    def __init__(self, state: TrainState) -> None:
        self._state = state

    def before_step(self, batch: StepBatch) -> None:
        self._state.keep_buffers()

    def skipped(self, batch: StepBatch) -> None:
        self._state.put_back_buffers()
