"""How many steps a run has, and what ends with one of them."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_core.trainers.train_state import TrainState


@dataclass(frozen=True)
class Steps:
    """The steps of a run whose `state` counts those that are done."""

    state: TrainState
    per_epoch: int
    total: int
    """All steps, unless a callback ends the run earlier."""

    @property
    def are_done(self) -> bool:
        """Whether nothing is left to train: all steps are done, or a callback has ended the run."""
        return self.state.step == self.total or self.state.position.ended_early is not None

    @property
    def ends_epoch(self) -> bool:
        """Whether an epoch has just ended; the end of the run may cut the last one short."""
        return self.are_done or self.state.step % self.per_epoch == 0

    @property
    def last_epoch(self) -> int:
        """The epoch of the last step that is done, counted from 0."""
        return (self.state.step - 1) // self.per_epoch
