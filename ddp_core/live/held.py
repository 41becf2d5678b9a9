"""What a rank holds of a training when it leaves its group: all that another trainer needs to go on from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from ddp_core.checkpoint.state import in_host_memory
from ddp_core.live.membership import Progress
from ddp_core.trainers.assemble import Trainer
from ddp_core.trainers.callback_calls import CallbackProgress, newest_told


@dataclass(frozen=True)
class HeldState:
    """The state of the last moment to which an unfinished step can go back.

    Its tensors are those of the trainer that it comes from, which must not train on; sent to another rank, they are
    copies. From a GPU they are copied to host memory: another rank has another GPU, and the new trainer needs the room.
    """

    at: Progress
    state: dict[str, Any]
    learning_rate: float
    loss: float
    """The loss of the newest step, for its record in the metrics."""
    saved_step: int
    """The step of the newest checkpoint; 0 where there is none."""
    noted_after: int
    """See `Witnessed`."""
    is_broken: bool
    """Whether the guard has found something; a rank that lost a peer at that moment may not have heard of it."""
    guard: dict[str, Any]
    """The figures of the guard so far."""
    told: CallbackProgress | None = None
    """What the callbacks of rank 0 have been told last, as far as this rank knows."""

    @classmethod
    def of(cls, trainer: Trainer) -> Self:
        """What this trainer holds; to be called when it is closed."""
        return cls(
            at=Progress(trainer.state.marked.step, trainer.state.is_settled),
            state=in_host_memory(trainer.state.marked_state(), trainer.job.device),
            learning_rate=trainer.state.learning_rate,
            loss=trainer.figures.loss,
            saved_step=trainer.saving.newest_step,
            noted_after=trainer.witnessed.noted_after,
            is_broken=trainer.guard.is_broken,
            guard=trainer.guard.figures,
            told=trainer.callbacks.told(),
        )

    @property
    def offer(self) -> HeldState:
        """What the other ranks must know of it: all but the weights and the like, which they have, too."""
        return replace(self, state={"position": self.state["position"]})

    def at_position(self, holder: HeldState, saved_step: int, offers: Sequence[HeldState]) -> HeldState:
        """These weights with the position of another rank, and with what all ranks know up to there.

        Ranks that hold the same step may differ in this, since rank 0 alone has done what follows an update.
        """
        told = newest_told((each.told for each in offers), holder.at.step)
        state = {**self.state, **holder.state}
        if told is not None:
            state["callbacks"] = told.states
        return replace(
            self,
            at=holder.at,
            state=state,
            saved_step=saved_step,
            told=told,
            # These decide which collectives a rank makes, so they must be alike on all.
            is_broken=any(each.is_broken for each in offers),
            noted_after=max(each.noted_after for each in offers),
        )

    def give_to(self, trainer: Trainer) -> None:
        """Let a new trainer go on from here."""
        state = trainer.state
        state.load_state_dict(self.state)
        state.mark(self.at.is_settled)
        state.learning_rate = self.learning_rate
        trainer.saving.newest_step = self.saved_step
        trainer.figures.loss = self.loss
        trainer.witnessed.noted_after = self.noted_after
        trainer.guard.is_broken = trainer.guard.is_broken or self.is_broken
        trainer.guard.figures.update(self.guard)
        trainer.callbacks.take_over(self.told, self.loss)
