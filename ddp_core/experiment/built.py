"""What is built from an experiment, and given to whoever trains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ddp_core.data.splits import Splits
from ddp_core.model.losses import Loss
from ddp_core.observe.callback import Callback
from ddp_core.observe.step import StepObserver


@dataclass(frozen=True)
class BuiltExperiment:
    """What training needs of an experiment: model, data, loss, optimizer, and what its file adds to them."""

    model: nn.Module
    loss: Loss
    splits: Splits
    optimizer: torch.optim.Optimizer
    """Over the model's parameters, on the device."""
    hits: Loss | None = None
    """How accuracy is counted: by the file's own function, or by the one that belongs to the loss."""
    schedule: LRScheduler | None = None
    """Over the optimizer; None where a built-in rule sets the rate."""
    metrics: Any = None
    """The file's own: a function, an object like one, or several by name; once they were tried, an `OwnMetrics`."""
    callbacks: Sequence[Callback] = ()
    observers: Sequence[StepObserver] = ()
