"""What `--shares auto` does: deals the micro-batches of a step to the ranks by the speed that each has shown."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_core.observe.step import StepBatch, StepObserver
from ddp_core.trainers.clock import StepClock
from ddp_core.trainers.strategy import Strategy
from ddp_core.trainers.train_state import Steps

MEASURED = 20
"""After so many steps of this start micro-batches are dealt anew, once."""
_WARM = 5
"""So many steps at first do not count."""
_PARTS = ("data", "forward", "backward")
"""The parts of a step that take a rank longer, the more micro-batches it has."""


class Dealing(StepObserver):
    """Measures the first steps, in equal shares, and then deals micro-batches so that all ranks end at one time."""

    def __init__(self, strategy: Strategy, clock: StepClock, steps: Steps) -> None:
        self._strategy, self._clock, self._steps = strategy, clock, steps
        self._seen, self._micro_batches, self._before, self._is_dealt = 0, 0, 0.0, False

    def settle(self, batch: StepBatch) -> None:
        """Count the step; after the last one that is measured, deal anew."""
        self._seen += 1
        self._micro_batches += len(batch.micro_batches)
        if self._seen == _WARM:
            self._before, self._micro_batches = self._computed(), 0
        if self._seen != MEASURED or self._steps.are_done or batch.stops:
            return
        job, cut = self._strategy.job, self._strategy.batches.cut
        seconds = job.collectives.gather((self._computed() - self._before) / max(1, self._micro_batches))
        counts = dealt(cut.micro_batches, seconds)
        job.console.say(
            f"from step {batch.step + 2} on ranks compute {' + '.join(map(str, counts))} micro-batches, by the "
            f"{', '.join(f'{1000 * each:.3g}' for each in seconds)} ms that one has taken on each"
        )
        job.metrics.write("dealt", step=batch.step + 1, micro_batches=counts, seconds=seconds)
        if counts != cut.counts:
            self._strategy.batches.deal(counts, batch.step + 1)
            self._is_dealt = True

    def before_step(self, batch: StepBatch) -> None:
        """After micro-batches were dealt, add up gradients as they are dealt now."""
        if self._is_dealt:
            self._is_dealt = False
            with self._clock.aside("other"):
                self._strategy.retrain()

    def _computed(self) -> float:
        return sum(self._clock.seconds[part] for part in _PARTS)


def dealt(micro_batches: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """How many micro-batches each rank gets, one at least, so that the last one ends as early as it can.

    `seconds`: what one micro-batch takes on each rank.
    """
    counts = [1] * len(seconds)
    for _ in range(micro_batches - len(seconds)):
        first = min(range(len(seconds)), key=lambda rank: (counts[rank] + 1) * seconds[rank])
        counts[first] += 1
    return tuple(counts)
