"""The base class of a user's callbacks, what they are told, and one that ends a run.

Needs no torch, so that an experiment file that only defines callbacks loads quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ddp_core.base.errors import UserError, nearest_name

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


class EarlyStopping(Callback):
    """Ends the run, as completed early, once a figure has not got better in `patience` evaluations in a row.

    `metric`: a figure of the evaluation, such as `test_loss`, or `train_loss`, the mean over the epoch. `minimum`: what
    the best value must be bettered by, in the figure's own unit, to count as better. `mode`: whether less ("min") or
    more ("max") is better; a name with "loss" or "accuracy" in it says so itself. Best value and patience are kept in
    every checkpoint. Raises UserError for values that cannot be meant.
    """

    def __init__(
        self,
        metric: str = "test_loss",
        patience: int = 3,
        minimum: float = 0.0,
        mode: Literal["min", "max"] | None = None,
    ) -> None:
        if mode is None:
            mode = "min" if "loss" in metric else "max" if "accuracy" in metric else None
        if mode not in ("min", "max"):
            raise UserError(f'EarlyStopping({metric!r}): say whether less or more is better: mode="min" or mode="max"')
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise UserError(f"EarlyStopping: patience is {patience!r}; it counts evaluations, 1 or more")
        if not 0 <= minimum < float("inf"):
            raise UserError(f"EarlyStopping: minimum is {minimum!r}; it is a difference, 0 or more")
        self.metric, self.patience, self.minimum, self.mode = metric, patience, minimum, mode
        self.best: float | None = None
        """The best value so far."""
        self.best_step = 0
        """The step after which it was found."""
        self.waited = 0
        """How many evaluations in a row have not bettered it."""

    def on_epoch(self, moment: Moment) -> None:
        """Look at the figure, where it is new."""
        if self.metric == "train_loss":
            value: Any = moment.loss
        elif moment.is_evaluated:
            value = self._figure(moment)
        else:
            return
        if value is not None and self._is_better(value):
            self.best, self.best_step, self.waited = float(value), moment.step, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            best = "never had a value" if self.best is None else f"best {self.best:.6g} at step {self.best_step}"
            moment.stop(
                f"{self.metric} has not got better in {self.waited} evaluation{'s' if self.waited > 1 else ''}, {best}"
            )

    def _figure(self, moment: Moment) -> Any:
        """The value of the figure. Raises UserError where the evaluation has no such number."""
        numbers = [name for name, value in moment.evaluation.items() if isinstance(value, int | float | None)]
        if self.metric in numbers:
            return moment.evaluation[self.metric]
        if not numbers:
            raise UserError(
                f"EarlyStopping({self.metric!r}): the experiment has no held-out samples, so nothing is evaluated; "
                'watch "train_loss"'
            )
        raise UserError(
            f"EarlyStopping: the evaluation has no number {self.metric}; {nearest_name(self.metric, numbers)}"
        )

    def _is_better(self, value: float) -> bool:
        """Whether the value betters the best one by more than the minimum; NaN does not."""
        if self.best is None:
            return value == value
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.minimum

    def state_dict(self) -> dict[str, Any]:
        """The best value, its step, and the patience used up."""
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` returned."""
        self.best, self.best_step, self.waited = state["best"], state["best_step"], state["waited"]
