"""Keeps the weights as they were before a loss that is not finite, also where the host reads losses only later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddp_core.config.options import Options
from ddp_core.trainers.train_state import TrainState

_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def steps_between_reading(options: Options, state: TrainState, device: torch.device) -> int:
    """After how many steps the host reads the losses: `log_every` on CUDA, where reading makes it wait for the device.

    1 on the CPU, and wherever the device alone cannot hold an update back: with an optimizer that is not one of torch's
    fused ones, with a schedule or an average, which move after each update, and where bad steps are to be skipped.
    """
    groups = state.optimizer.param_groups
    holds_back = type(state.optimizer) in _FUSED and all(group.get("fused") for group in groups)
    if device.type == "cpu" or options.on_nan == "skip" or not holds_back:
        return 1
    return options.log_every if state.schedule is None and state.average is None else 1


class LossGate:
    """Closes, on the device, at the first loss that is not finite, and lets no update through from then on.

    The fused optimizers of torch change neither weights nor their own state where `found_inf` is 1, and exactly 1: so
    what a GradScaler found and what the losses say are not added. The host learns of it when it reads the losses.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._closed = torch.zeros((), device=device)
        optimizer.register_step_pre_hook(self._before_step)

    def see(self, losses: Tensor) -> None:
        """Take in a step's losses, before its update."""
        self._closed.masked_fill_(losses.isfinite().all().logical_not(), 1.0)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        # A GradScaler sets `found_inf` for the step that it makes, and removes it afterwards.
        found = getattr(optimizer, "found_inf", self._closed)
        optimizer.found_inf = torch.maximum(found, self._closed)
