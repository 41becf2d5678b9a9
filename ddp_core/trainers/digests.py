"""The digests of its weights that a run writes down while it trains."""

from __future__ import annotations

from ddp_core.base.digests import weights_digest
from ddp_core.observe.step import StepBatch, StepObserver
from ddp_core.trainers.clock import StepClock
from ddp_core.trainers.job import Job
from ddp_core.trainers.train_state import Steps


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
