"""What a resumed run needs: weights, optimizer and the like, and the position, from which random state follows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ddp_core.checkpoint import whole_tensors
from ddp_core.model.averaging import WeightAverage
from ddp_core.sharding import Ownership, OwnsAll


@dataclass
class TrainState:
    """The record that a checkpoint holds; `step` counts finished optimizer steps over the whole run."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None = None
    schedule: LRScheduler | None = None
    """The experiment's own; a built-in rule has no state."""
    average: WeightAverage | None = None
    learning_rate: float = math.nan
    """Used by the last update, of the first parameter group; not saved."""
    step: int = 0
    epoch_loss: float = 0.0
    """Sum of the losses of all samples trained in the epoch so far."""
    epoch_samples: int = 0
    last_epoch_loss: float | None = None
    """Mean loss over the samples of the last whole epoch."""
    best: float | None = None
    evaluation: dict[str, Any] = field(default_factory=dict)
    trained_seconds: float = 0.0
    trained_samples: int = 0
    ownership: Ownership = field(init=False)
    """What this process has of weights and optimizer state: all of both, until they are cut."""

    def __post_init__(self) -> None:
        self.ownership = OwnsAll(self.model, self.optimizer)

    def end_epoch(self) -> None:
        """Keep the mean loss over the epoch's samples, and start to count the next epoch's."""
        if self.epoch_samples:
            self.last_epoch_loss = self.epoch_loss / self.epoch_samples
        self.epoch_loss, self.epoch_samples = 0.0, 0

    def take_evaluation(self, evaluation: dict[str, Any]) -> bool:
        """Keep an evaluation's figures; returns whether they are the best so far, by accuracy or else by loss."""
        self.evaluation = evaluation
        score = evaluation.get("test_accuracy", -evaluation.get("test_loss", math.nan))
        if math.isnan(score) or (self.best is not None and score <= self.best):
            return False
        self.best = score
        return True

    def state_dict(self, in_parts: bool = False) -> dict[str, Any]:
        """The state in nested dictionaries of tensors and plain JSON types.

        Where something is sharded, a collective; its state is then whole on rank 0, and None on the other ranks.
        With `in_parts` it is on every rank a tree with CutTensors of what this rank has, and no tensor is sent.
        """
        owned = self.ownership
        return {
            "model": owned.own_weights() if in_parts else owned.whole_weights(),
            "optimizer": owned.own_state() if in_parts else owned.whole_state(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "average": self._averages(in_parts),
            "position": {
                "step": self.step,
                "epoch_loss": self.epoch_loss,
                "epoch_samples": self.epoch_samples,
                "last_epoch_loss": self.last_epoch_loss,
                "best": self.best,
                "evaluation": self.evaluation,
                "trained_seconds": self.trained_seconds,
                "trained_samples": self.trained_samples,
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned for all ranks; in the place of tensors there may be whole CutTensors."""
        self.ownership.load_weights(state["model"])
        self.ownership.load_state(state["optimizer"])
        for name in ("scaler", "schedule", "average"):
            part = getattr(self, name)
            if part is not None and state.get(name) is not None:
                part.load_state_dict(whole_tensors(state[name]))
        for name, value in state["position"].items():
            setattr(self, name, value)

    def _averages(self, in_parts: bool) -> dict[str, Any] | None:
        """The state dict of the averaged weights, whole on all ranks; with `in_parts` cut as the weights are."""
        if self.average is None:
            return None
        state: dict[str, Any] = self.average.state_dict()
        if in_parts:
            own = self.ownership.own_weights(self.average.module)
            state.update({f"module.{name}": value for name, value in own.items()})
        return state
