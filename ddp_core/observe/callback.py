"""The base class of a user's callbacks, and what they are told.

Needs no torch, so that an experiment file that only defines callbacks loads quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Moment:
    """Where training stands, and its figures."""

    step: int
    """How many steps are done."""
    epoch: int
    """The epoch of the last step, counted from 0."""
    loss: float | None
    """Mean over the samples of the step, in `on_epoch` and `on_end` of the epoch; None where it was not read.

    On CUDA, losses may be read every `--log-every` steps only.
    """
    learning_rate: float
    """Used by the last update, of the first parameter group."""
    evaluation: Mapping[str, Any]
    """The figures of the last evaluation, as in run.json; empty before the first."""
    model: nn.Module
    """The model itself, without DistributedDataParallel around it."""
    averaged_model: nn.Module | None
    """The model with averaged weights, where the experiment has an `ema_decay`."""
    rank: int
    directory: Path
    """The run directory."""
    is_evaluated: bool = False
    """Whether `evaluation` is of just this epoch, in `on_epoch`; the experiment says after which epochs one is due."""
    rehearsal: bool = False
    """Whether this is no run, but its steps tried elsewhere: what is written into `directory` is thrown away."""
    # In a moment that no trainer has made, nobody is told.
    _stop: Callable[[str], None] = field(default=lambda reason: None, repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def stop(self, reason: str) -> None:
        """End the run after this step, as completed early: it is evaluated and saved, and all ranks end with it.

        `reason` goes into the record. Of callbacks with `ranks = "all"` every rank must ask in the same step. In
        `on_end`, or at the last step, there is nothing left to end.
        """
        self._stop(reason)


class Callback:
    """The base class of a user's object that is called while a run goes on. It overrides the methods that it needs.

    What it raises ends the run as a mistake in the experiment. It must not change weights in a way that depends on the
    rank: the result would depend on the layout. It may change what is trained (`requires_grad`), on all ranks alike.
    """

    ranks: Literal["first", "all"] = "first"
    """Which ranks call it: rank 0 alone, or each its own."""

    def on_step(self, moment: Moment) -> None:
        """A step is done; the evaluation and the save that may be due after it come next."""

    def on_epoch(self, moment: Moment) -> None:
        """An epoch is done, and evaluated where that is due; a checkpoint is saved next."""

    def on_end(self, moment: Moment) -> None:
        """Training has come to its end, and its last checkpoint is written; not called for a run that was stopped."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know: tensors, numbers, strings, lists and dictionaries, kept in every checkpoint.

        Rank 0's counts.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` returned; called on every rank, before the first step."""
