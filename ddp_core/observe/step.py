"""A training as an observer sees it: the batch of a step, the losses of all ranks, and the moments.

Needs no torch, so that commands which only read what observers have written start quickly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_core.config.cut import MicroBatch
    from ddp_core.sampler import Ids


@dataclass
class StepBatch:
    """One process's part of a step: the micro-batches that it computes, with their sample ids, inputs and targets."""

    step: int
    """Counted from 0: the number of steps before this one."""
    epoch: int
    samples: int
    """Samples of the whole global batch, over all ranks."""
    divisor: int
    """What the loss of the global batch is divided by, to be a mean: the samples, or what they weigh together."""
    micro_batches: list[MicroBatch]
    ids: list[Ids]
    tensors: Sequence[tuple[Any, Any]]
    """Inputs and targets of each micro-batch, trees of tensors on the device that trains."""
    wait_seconds: float = 0.0
    """How long the loop waited for this batch."""
    stops: bool = False
    """Whether the run is to end after this step, on request, to be resumed later; known once losses are read."""


@dataclass(frozen=True)
class StepReport:
    """The losses of a step, the same on every rank."""

    step: int
    """Counted from 0, as in StepBatch."""
    samples: int
    divisor: int
    losses: list[float]
    """The loss of each micro-batch, summed over its samples."""

    @cached_property
    def loss(self) -> float:
        """The loss summed over the samples of the global batch."""
        return sum(self.losses)

    @property
    def is_finite(self) -> bool:
        """Whether no loss of the step is NaN or infinite."""
        return math.isfinite(self.loss)


class StepObserver:
    """Something that is told the moments of a training; the methods stand in the order in which they are called.

    An observer may wait, write, or raise on every rank to end the run. It overrides the methods that it needs; the
    others do nothing.
    """

    def begin(self) -> None:
        """This process begins to train in a new group of ranks; each of them is told."""

    def before_step(self, batch: StepBatch) -> None:
        """The batch is loaded, and nothing of it has been computed yet."""

    def before_wait(self) -> None:
        """This rank will now wait for other ranks; of several calls in a step, the first one counts."""

    def losses_read(self, reports: Sequence[StepReport]) -> None:
        """Losses are read now, oldest first; next, one that is not finite ends the run, or its step is skipped.

        On CUDA that is not in each step; what an epoch has left is read at its end, after `step_done`.
        """

    def gradients_done(self, batch: StepBatch, reports: Sequence[StepReport]) -> None:
        """The mean gradients are computed, and the weights change next; `reports` are those of `losses_read`.

        With fp16 the gradients are still multiplied by the scale; with shards this rank has its part of them.
        """

    def skipped(self, batch: StepBatch) -> None:
        """A loss was not finite: the weights stay as they are."""

    def after_step(self, batch: StepBatch) -> None:
        """The weights have been updated (or the step skipped), and the step counts as done."""

    def step_done(self, batch: StepBatch) -> None:
        """All observers know of the step; ranks may agree here that it is the last one."""

    def epoch_done(self, batch: StepBatch) -> None:
        """The step was the last one of its epoch, or of the run."""

    def settle(self, batch: StepBatch) -> None:
        """Weights change no more before the next step: they may be compared, and saved."""

    def end(self) -> None:
        """All steps are done; whoever does not let the result pass raises now."""

    def ended(self) -> None:
        """The result stands."""


def overrides(each: Any, base: type, name: str) -> bool:
    """Whether the object does something of its own in this method of its base class."""
    return getattr(getattr(each, name), "__func__", None) is not getattr(base, name)


class StepObservers(StepObserver):
    """Several observers as one, called in the order given; `boundary`, around each call, says whose code they are."""

    def __init__(self, observers: Sequence[StepObserver], boundary: AbstractContextManager[Any] | None = None) -> None:
        for moment in (name for name in vars(StepObserver) if not name.startswith("_")):
            # Most observers do something at one or two moments.
            if acts := [getattr(each, moment) for each in observers if overrides(each, StepObserver, moment)]:
                setattr(self, moment, partial(_call_all, acts, boundary or nullcontext()))


def _call_all(acts: Sequence[Callable[..., None]], boundary: AbstractContextManager[Any], *words: Any) -> None:
    with boundary:
        for act in acts:
            act(*words)
