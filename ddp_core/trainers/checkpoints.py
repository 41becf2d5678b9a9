"""When a checkpoint is due, and what is in it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.observe.step import StepBatch, StepObserver, StepReport
from ddp_core.trainers.clock import StepClock
from ddp_core.trainers.job import Job
from ddp_core.trainers.train_state import TrainState


class Saving(StepObserver):
    """Saves checkpoints of the state: rank 0 writes them, and the other ranks only wait where that is asked for.

    Where the state is sharded among ranks, each rank writes its part.
    """

    def __init__(self, job: Job, state: TrainState, clock: StepClock, steps_per_epoch: int) -> None:
        self._job, self._state, self._clock, self._steps_per_epoch = job, state, clock, steps_per_epoch
        self._every = job.options.checkpoint_every
        self._newest = 0

    def begin(self) -> None:
        """Training starts here: a state that is not at step 0 came from the checkpoint of its step."""
        self._newest = self._state.step

    @property
    def newest(self) -> str:
        """What a message says of the newest checkpoint."""
        return f"the checkpoint of step {self._newest} is good" if self._newest else "nothing has been saved yet"

    def gradients_done(self, batch: StepBatch, reports: Sequence[StepReport]) -> None:
        if self._job.checkpointer is not None:
            self._job.checkpointer.before_update()

    def after_step(self, batch: StepBatch) -> None:
        if self._job.checkpointer is not None:
            self._job.checkpointer.check()

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps: every `checkpoint_every` steps, else at each epoch's end."""
        return step % (self._every or self._steps_per_epoch) == 0

    def wait(self) -> None:
        """Return once the last checkpoint is written, on the ranks that write."""
        if self._job.checkpointer is not None:
            self._job.checkpointer.wait()

    def save(self, best: bool = False, wait: bool = False) -> None:
        """Save a checkpoint after the step just done; with `wait`, all ranks return once it is written.

        Raises UserError (5), on every rank, where a weight is NaN or infinite: gradients can be so though no loss is.
        """
        job, state, before = self._job, self._state, time.perf_counter()
        with self._clock.aside("checkpoint"):
            bad = first_not_finite(state.ownership.trained)
            if not state.ownership.has_whole_weights:
                # Each rank has looked at what it owns.
                bad = next(filter(None, job.collectives.gather(bad)), None)
            if bad:
                raise UserError(
                    f"parameter {bad} is not finite after step {state.step}, so this step is not saved, "
                    f"{self.newest}: lower optimizer.lr, or set clip_norm",
                    ExitCode.NUMERICS,
                )
            if job.checkpointer is not None:
                job.checkpointer.save(
                    state.state_dict(in_parts=job.layout.saves_in_parts),
                    step=state.step,
                    epoch=state.step // self._steps_per_epoch,
                    metadata={"experiment_sha256": job.experiment.digest(), "layout": job.layout.label},
                    metric=state.best if best else None,
                    best=best,
                    changing=state.model.buffers(),
                )
            if wait:
                self.wait()
                job.collectives.barrier()
        self._newest = state.step
        job.metrics.write("checkpoint", step=state.step, seconds=time.perf_counter() - before)


def first_not_finite(trained: Mapping[str, Tensor]) -> str | None:
    """The name of the first of these parameters with a NaN or infinite element; None where there is none.

    Buffers and frozen parameters are not looked at: a mask holds -inf on purpose.
    """
    trained = {name: each for name, each in trained.items() if each.numel()}
    # One norm of all, because the host then waits for the device once. It may overflow though no element is infinite.
    if math.isfinite(nn.utils.get_total_norm(list(trained.values())).item()):
        return None
    return next((name for name, each in trained.items() if not each.isfinite().all()), None)
