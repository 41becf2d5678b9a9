"""What a resumed run needs: weights, optimizer, scaler, and position (from which random state and rate follow)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class TrainState:
    """The record that a checkpoint holds; `step` counts finished optimizer steps over the whole run."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None = None
    step: int = 0
    epoch_loss: float = 0.0
    """Sum of the losses of all samples trained in the epoch so far."""
    epoch_samples: int = 0
    last_epoch_loss: float | None = None
    """Mean loss over the samples of the last whole epoch."""
    best: float | None = None
    evaluation: dict[str, float] = field(default_factory=dict)
    trained_seconds: float = 0.0
    trained_samples: int = 0

    def end_epoch(self) -> None:
        """Keep the mean loss over the epoch's samples, and start to count the next epoch's."""
        if self.epoch_samples:
            self.last_epoch_loss = self.epoch_loss / self.epoch_samples
        self.epoch_loss, self.epoch_samples = 0.0, 0

    def take_evaluation(self, evaluation: dict[str, float]) -> bool:
        """Keep an evaluation's figures; returns whether they are the best so far, by accuracy or else by loss."""
        self.evaluation = evaluation
        score = evaluation.get("test_accuracy", -evaluation.get("test_loss", math.nan))
        if math.isnan(score) or (self.best is not None and score <= self.best):
            return False
        self.best = score
        return True

    def state_dict(self) -> dict[str, Any]:
        """The state in nested dictionaries of tensors and plain JSON types."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
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
        """Load what `state_dict` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        for name, value in state["position"].items():
            setattr(self, name, value)
