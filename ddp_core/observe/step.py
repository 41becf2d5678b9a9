"""One step of training as an observer sees it: the batch, the losses of all ranks, and when it is called.

Needs no torch, so that commands which only read what observers have written start quickly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_core.config.cut import MicroBatch
    from ddp_core.data.trees import Batch
    from ddp_core.sampler import Ids


@dataclass
class StepBatch:
    """One process's part of a step: the micro-batches that it computes, with their sample ids, inputs and targets."""

    step: int
    """Counted from 0: the number of steps before this one."""
    epoch: int
    samples: int
    """Samples of the whole global batch, over all ranks."""
    micro_batches: list[MicroBatch]
    ids: list[Ids]
    tensors: Sequence[Batch]
    """Inputs and targets of each micro-batch, on the device that trains."""
    wait_seconds: float = 0.0
    """How long the loop waited for this batch."""


@dataclass(frozen=True)
class StepReport:
    """The losses of a step, the same on every rank."""

    step: int
    """Counted from 0, as in StepBatch."""
    samples: int
    losses: list[float]
    """Of each micro-batch, summed over its samples."""

    @cached_property
    def loss(self) -> float:
        """The loss summed over the samples of the global batch."""
        return sum(self.losses)

    @property
    def is_finite(self) -> bool:
        """Whether no loss of the step is NaN or infinite."""
        return math.isfinite(self.loss)


class StepObserver:
    """Something that is called at the moments of every step; the methods stand in the order in which they are called.

    An observer may wait, write, or raise to end the run. It overrides the methods that it needs; the others do nothing.
    """

    def before_step(self, batch: StepBatch) -> None:
        """The batch is loaded, and nothing of it has been computed yet."""

    def before_wait(self) -> None:
        """This rank will now wait for other ranks; of several calls in a step, the first one counts."""

    def gradients_done(self, batch: StepBatch, reports: Sequence[StepReport]) -> None:
        """Every `.grad` holds the mean gradient; weights change next. `reports` are those read now, oldest first."""

    def skipped(self, batch: StepBatch) -> None:
        """A loss was not finite: the weights stay as they are."""

    def after_step(self, batch: StepBatch) -> None:
        """The weights have been updated (or the step skipped), and the step counts as done."""


class StepObservers(StepObserver):
    """Several observers as one; at each moment those that do something then are called, in the order given."""

    def __init__(self, observers: Sequence[StepObserver]) -> None:
        self._before_step = [each.before_step for each in observers if _acts(each, "before_step")]
        self._before_wait = [each.before_wait for each in observers if _acts(each, "before_wait")]
        self._gradients_done = [each.gradients_done for each in observers if _acts(each, "gradients_done")]
        self._skipped = [each.skipped for each in observers if _acts(each, "skipped")]
        self._after_step = [each.after_step for each in observers if _acts(each, "after_step")]

    def before_step(self, batch: StepBatch) -> None:
        for act in self._before_step:
            act(batch)

    def before_wait(self) -> None:
        for act in self._before_wait:
            act()

    def gradients_done(self, batch: StepBatch, reports: Sequence[StepReport]) -> None:
        for act in self._gradients_done:
            act(batch, reports)

    def skipped(self, batch: StepBatch) -> None:
        for act in self._skipped:
            act(batch)

    def after_step(self, batch: StepBatch) -> None:
        for act in self._after_step:
            act(batch)


def _acts(observer: StepObserver, moment: str) -> bool:
    """Whether the observer does something of its own at this moment: most do so at one or two of the five."""
    return getattr(type(observer), moment) is not getattr(StepObserver, moment)
