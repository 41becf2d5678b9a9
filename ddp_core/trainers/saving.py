"""When a checkpoint is due, and what saves it."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.torch_internals import writes_to
from ddp_core.observe.step import StepBatch, StepObserver, StepReport
from ddp_core.trainers.clock import StepClock
from ddp_core.trainers.job import Job
from ddp_core.trainers.noting import state_digests
from ddp_core.trainers.train_state import Steps


class Saving(StepObserver):
    """Saves checkpoints of the state: rank 0 writes them, and the other ranks only wait where that is asked for.

    Where the state is sharded among ranks, each rank writes its part.
    """

    def __init__(self, job: Job, clock: StepClock, steps: Steps) -> None:
        self._job, self._state, self._clock, self._steps = job, steps.state, clock, steps
        self._checkpointer = job.run.checkpointer
        self._every = job.options.checkpoint_every
        self._counts: dict[str, int] = {}
        """How many writes torch has counted for each parameter, as this step began."""
        self._looks: bool | None = None
        """Whether writes to parameters are looked for in this step; None before the first one."""
        self._written: set[str] = set()
        """The parameters that a step has written to before its update, such as a forward that clamps its weights."""
        self._aside_step: int | None = None
        """The step of the last checkpoint that is copied while training goes on."""
        self.newest_step = 0
        """The step of the newest checkpoint; 0 where there is none."""

    @property
    def newest(self) -> str:
        """What a message says of the newest checkpoint."""
        return (
            f"the checkpoint of step {self.newest_step} is good" if self.newest_step else "nothing has been saved yet"
        )

    def before_step(self, batch: StepBatch) -> None:
        # Reading the counters of a thousand parameters takes a millisecond: it is done in the first step, and in those
        # right before and right after a save.
        step, saves = self._state.step, self._checkpointer is not None
        self._looks = saves and (self._looks is None or self._aside_step == step or self.is_due(step + 1))
        if self._looks:
            self._counts = self._writes()

    def gradients_done(self, batch: StepBatch, reports: Sequence[StepReport]) -> None:
        if self._checkpointer is not None:
            if self._looks:
                now = self._writes()
                self._learn_written([name for name in now if now[name] != self._counts.get(name)])
            self._checkpointer.before_update()

    def after_step(self, batch: StepBatch) -> None:
        if self._checkpointer is not None:
            self._checkpointer.check()

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps: every `checkpoint_every` steps, else at each epoch's end.

        Also where one is kept for an audit.
        """
        kept = self._job.run.kept_every
        return step % (self._every or self._steps.per_epoch) == 0 or (kept is not None and step % kept == 0)

    def may_save(self, step: int) -> bool:
        """Whether a checkpoint may be saved after `step` steps: also the best one after an epoch, and the last one."""
        is_last = step == self._steps.total or self._state.position.ended_early is not None
        return self.is_due(step) or step % self._steps.per_epoch == 0 or is_last

    @property
    def is_due_now(self) -> bool:
        """Whether a checkpoint is to be saved after the step just done: one that is due, the best one, or the last."""
        state = self._state
        is_due = self.is_due(state.step) or state.is_best or self._steps.are_done
        return is_due and self.newest_step < state.step  # a lost rank 0 may have saved this step

    def _writes(self) -> dict[str, int]:
        return {name: writes_to(parameter) for name, parameter in self._state.model.named_parameters()}

    def _learn_written(self, names: list[str]) -> None:
        """Let later saves copy these parameters at once; warns of one that was saved aside while they were written."""
        if new := [name for name in names if name not in self._written]:
            self._written.update(new)
            if self._aside_step == self._state.step:
                self._job.console.say(
                    f"warning: step {self._state.step + 1} is the first in which forward or a callback writes to "
                    f"{', '.join(new)}, so the checkpoint of step {self._state.step}, which was copied meanwhile, may "
                    "hold what it wrote; later ones will not, and --synchronous-save copies each at once"
                )

    def _changing(self) -> list[Tensor]:
        """What may change before the next update: buffers, and the parameters that steps write to."""
        # What cuts parameters among ranks (DTensor) does not let a forward write to what it keeps.
        written = (
            parameter
            for name, parameter in self._state.model.named_parameters()
            if name in self._written and type(parameter.detach()) is Tensor
        )
        return [*self._state.model.buffers(), *written]

    def hold(self, steps: Collection[int]) -> None:
        """Let the checkpoints of these steps, and no others, stay beside those that stay by themselves."""
        if self._checkpointer is not None:
            self._checkpointer.hold(steps)

    def let_go(self) -> None:
        """Hold no checkpoint any more, and remove those that were only held."""
        if self._checkpointer is not None:
            self._checkpointer.let_go()

    def is_writing(self, seconds: float = 0.0) -> bool:
        """Whether a checkpoint is still being written here after so many seconds."""
        return self._checkpointer is not None and self._checkpointer.is_writing(seconds)

    def wait(self) -> None:
        """Return once the last checkpoint is written, on the ranks that write."""
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def settle(self, batch: StepBatch) -> None:
        if self.is_due_now or (batch.stops and self.newest_step < self._state.step):
            self.save()
        if batch.stops:
            self.wait()
            self._job.collectives.barrier()

    def end(self) -> None:
        self.wait()

    def save(self) -> None:
        """Save a checkpoint after the step just done.

        Raises UserError (5), on every rank, where a weight is NaN or infinite: gradients can be so though no loss is.
        Raises UserError (2) for an optimizer whose state no checkpoint can hold.
        """
        job, state, before = self._job, self._state, time.perf_counter()
        best = state.is_best
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
            try:
                self._note_kept()
                if self._checkpointer is not None:
                    self._checkpointer.save(
                        state.state_dict(in_parts=job.layout.saves_in_parts),
                        step=state.step,
                        epoch=state.step // self._steps.per_epoch,
                        metadata={"experiment_sha256": job.experiment.digest(), "layout": job.layout.label},
                        metric=state.position.best if best else None,
                        best=best,
                        changing=self._changing(),
                    )
                    self._aside_step = state.step if self._checkpointer.asynchronous else None
            except (TypeError, ValueError):
                state.require_saveable()
                raise
        self.newest_step = state.step
        job.metrics.write("checkpoint", step=state.step, seconds=time.perf_counter() - before)

    def _note_kept(self) -> None:
        """Note the digests of a checkpoint that is kept for an audit, before it is there."""
        run, state = self._job.run, self._state
        if run.kept_every is None or (state.step % run.kept_every and not self._steps.are_done):
            return
        whole = state.ownership.whole_on_first(state.state_dict(in_parts=self._job.layout.saves_in_parts))
        if run.note_kept is not None and whole is not None:
            run.note_kept(state.step, state_digests(whole))


def first_not_finite(trained: Mapping[str, Tensor]) -> str | None:
    """The name of the first of these parameters with a NaN or infinite element; None where there is none.

    Buffers and frozen parameters are not looked at: a mask holds -inf on purpose.
    """
    trained = {name: each for name, each in trained.items() if each.numel()}
    # One norm of all, because the host then waits for the device once. It may overflow though no element is infinite.
    if math.isfinite(nn.utils.get_total_norm(list(trained.values())).item()):
        return None
    return next((name for name, each in trained.items() if not each.isfinite().all()), None)
