"""A schedule of the learning rate that the experiment's file has built, one of torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ddp_core.base.errors import UserError
from ddp_core.model.optimizers import require_saveable


def require_schedules(schedule: Any, optimizer: torch.optim.Optimizer, name: str) -> None:
    """Check what the experiment's own function returned for `optimizer`; `name` is how a message calls that function.

    Raises UserError unless it is a scheduler of torch for this optimizer that needs nothing but the number of steps,
    and has a state that can be saved.
    """
    if not isinstance(schedule, LRScheduler):
        raise UserError(
            f"{name} returned a {type(schedule).__name__}; it returns a torch.optim.lr_scheduler.LRScheduler"
        )
    what = f"{name} returned a {type(schedule).__name__}"
    if isinstance(schedule, ReduceLROnPlateau):
        raise UserError(
            f"{what}, which waits for a loss to stop falling; a schedule here is moved on after every update and sees "
            "no loss: use one that depends on the step alone"
        )
    if schedule.optimizer is not optimizer:
        raise UserError(f"{what} for another optimizer: build it from the optimizer that the function is given")
    require_saveable(schedule.state_dict(), what)
