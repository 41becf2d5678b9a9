"""What a resumed run needs: weights, optimizer and the like, and the position, from which random state follows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ddp_core.model.averaging import WeightAverage
from ddp_core.sharding import ShardedOptimizer

if TYPE_CHECKING:
    from ddp_core.sharding.fully_sharded import FullySharded


@dataclass
class TrainState:
    """The record that a checkpoint holds; `step` counts finished optimizer steps over the whole run."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None = None
    schedule: LRScheduler | None = None
    """The experiment's own; a built-in rule has no state."""
    average: WeightAverage | None = None
    sharded: ShardedOptimizer | FullySharded | None = None
    """Where `optimizer` updates this rank's pieces of the parameters alone, and has the state of these alone."""
    fully_sharded: FullySharded | None = None
    """Where `model` has this rank's rows of the parameters alone."""
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
        return {
            "model": self.own_weights() if in_parts else self.weights(),
            "optimizer": self.own_optimizer_state() if in_parts else self.optimizer_state(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "average": None if self.average is None else self.averages(in_parts),
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

    def weights(self) -> dict[str, Any] | None:
        """The model's state dict, as one process has it; see `state_dict` for sharded parameters."""
        return self.model.state_dict() if self.fully_sharded is None else self.fully_sharded.whole_weights()

    def own_weights(self) -> dict[str, Any]:
        """The model's state dict, with CutTensors of what this rank has of the parameters that are sharded."""
        if self.fully_sharded is not None:
            return self.fully_sharded.own_weights()
        assert isinstance(self.sharded, ShardedOptimizer)
        return self.sharded.own_weights(self.model)

    def described(self) -> dict[str, Any]:
        """The model's state dict, as one process has it, of which only names, dtypes and shapes are meant."""
        state = self.model.state_dict()
        if self.fully_sharded is None:
            return state
        return {
            name: torch.empty((), dtype=value.dtype).expand(value.shape) if isinstance(value, Tensor) else value
            for name, value in state.items()
        }

    def trained(self) -> dict[str, Tensor]:
        """The trained parameters by name; of sharded ones, this rank's rows."""
        if self.fully_sharded is not None:
            return self.fully_sharded.trained
        return {name: each.detach() for name, each in self.model.named_parameters() if each.requires_grad}

    def optimizer_state(self) -> dict[str, Any] | None:
        """The optimizer's state dict, as one process has it; see `state_dict` for a sharded optimizer's."""
        return self.optimizer.state_dict() if self.sharded is None else self.sharded.whole_state()

    def own_optimizer_state(self) -> dict[str, Any]:
        """The state dict of a sharded optimizer, with CutTensors of what this rank has."""
        assert self.sharded is not None
        return self.sharded.own_state()

    def averages(self, in_parts: bool) -> dict[str, Any]:
        """The state dict of the averaged weights, whole on all ranks; with `in_parts` cut as the weights are."""
        assert self.average is not None
        state: dict[str, Any] = self.average.state_dict()
        if in_parts and isinstance(self.sharded, ShardedOptimizer):
            own = self.sharded.own_weights(self.model, self.average.module)
            state.update({f"module.{name}": value for name, value in own.items()})
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        load_model = self.model.load_state_dict if self.fully_sharded is None else self.fully_sharded.load_whole_weights
        load_model(state["model"])
        load_optimizer = self.optimizer.load_state_dict if self.sharded is None else self.sharded.load_whole_state
        load_optimizer(state["optimizer"])
        for name in ("scaler", "schedule", "average"):
            part = getattr(self, name)
            if part is not None and state.get(name) is not None:
                part.load_state_dict(state[name])
        for name, value in state["position"].items():
            setattr(self, name, value)
