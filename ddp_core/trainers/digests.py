"""Digests that a run writes down while it trains: of its weights, and of the checkpoints that are kept for an audit."""

from __future__ import annotations

from ddp_core.base.digests import weights_digest
from ddp_core.observe.step import StepBatch, StepObserver
from ddp_core.trainers.clock import StepClock
from ddp_core.trainers.job import Job
from ddp_core.trainers.noting import state_digests
from ddp_core.trainers.saving import Saving
from ddp_core.trainers.steps import Steps


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


class KeptDigests(StepObserver):
    """Notes the digests of the checkpoints that are kept for an audit; told before they are saved."""

    def __init__(self, job: Job, clock: StepClock, steps: Steps, saving: Saving) -> None:
        self._job, self._clock, self._steps, self._saving = job, clock, steps, saving

    def settle(self, batch: StepBatch) -> None:
        run, state = self._job.run, self._steps.state
        if run.kept_every is None or not self._saving.is_due_now:
            return
        if state.step % run.kept_every == 0 or self._steps.are_done:
            with self._clock.aside("checkpoint"):
                whole = state.ownership.whole_on_first(state.state_dict(in_parts=self._job.layout.saves_in_parts))
                if run.note_kept is not None and whole is not None:
                    run.note_kept(state.step, state_digests(whole))
