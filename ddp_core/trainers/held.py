"""What a rank holds of a training when it leaves its group: all that another trainer needs to go on from there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from ddp_core.distributed.membership import Held
from ddp_core.trainers.step_chain import Noted, merged
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
    notes: Sequence[Noted] = ()
    """Of the newest steps, for a chain whose file may not have them yet."""

    @classmethod
    def of(cls, trainer: Trainer) -> Self:
        """What this trainer holds; to be called when it is closed."""
        return cls(
            at=Held(*trainer.state.committed_at),
            state=trainer.state.committed(),
            learning_rate=trainer.state.learning_rate,
            loss=trainer.figures.loss,
            saved_step=trainer.saving.newest_step,
            notes=() if trainer.chain is None else trainer.chain.notes(),
        )

    @property
    def position(self) -> dict[str, Any]:
        """What may differ between ranks after the same step, as rank 0 alone has done what follows."""
        position: dict[str, Any] = self.state["position"]
        return position

    def at_position(
        self, at: Held, position: dict[str, Any], saved_step: int, notes: Iterable[Sequence[Noted]]
    ) -> HeldState:
        """The same weights with another rank's position, and the notes of all ranks up to there."""
        state, kept = {**self.state, "position": position}, merged(notes, at.step)
        return replace(self, at=at, state=state, saved_step=saved_step, notes=kept)

    def give_to(self, trainer: Trainer) -> None:
        """Let a new trainer go on from here."""
        state = trainer.state
        state.load_state_dict(self.state)
        state.commit(self.at.is_settled)
        state.learning_rate = self.learning_rate
        trainer.figures.loss = self.loss
