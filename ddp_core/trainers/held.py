"""What a rank holds of a training when it leaves its group: all that another trainer needs to go on from there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from ddp_core.distributed.membership import Held
from ddp_core.trainers.trainer import Trainer


@dataclass(frozen=True)
class HeldState:
    """The state of the last moment to which an unfinished step can go back.

    Its tensors are those of the trainer that it comes from, which must not train on; sent to another rank, they are
    copies.
    """

    at: Held
    state: dict[str, Any]
    learning_rate: float
    loss: float
    """Of the newest step, for its record in the metrics."""
    saved_step: int
    """The step of the newest checkpoint; 0 where there is none."""

    @classmethod
    def of(cls, trainer: Trainer) -> Self:
        """What this trainer holds; to be called when it is closed."""
        return cls(
            at=Held(*trainer.state.committed_at),
            state=trainer.state.committed(),
            learning_rate=trainer.state.learning_rate,
            loss=trainer.figures.loss,
            saved_step=trainer.saving.newest_step,
        )

    @property
    def position(self) -> dict[str, Any]:
        """What may differ between ranks after the same step, as rank 0 alone has done what follows."""
        position: dict[str, Any] = self.state["position"]
        return position

    def at_position(self, at: Held, position: dict[str, Any], saved_step: int) -> HeldState:
        """The same weights with another rank's position."""
        return replace(self, at=at, state={**self.state, "position": position}, saved_step=saved_step)

    def give_to(self, trainer: Trainer) -> None:
        """Let a new trainer go on from here."""
        state = trainer.state
        state.load_state_dict(self.state)
        state.commit(self.at.is_settled)
        state.learning_rate = self.learning_rate
        trainer.figures.loss = self.loss
