"""The parameters of a diagnosed script: what has happened to each since the last optimizer step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_lab.diagnose.recorder import digest, some_elements

_SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas", "base_momentum", "max_momentum")
"""Settings of an optimizer that schedules change."""


class Watched:
    """One parameter; `name` is that in the first model that was called with it."""

    def __init__(self, parameter: Tensor, name: str) -> None:
        self.name, self.parameter = name, parameter
        self._is_hooked = False
        self._own: Tensor | None = None
        self._unclipped: Tensor | None = None
        self._is_own_known = True
        self.before, self._elements = "", torch.empty(0)

    def hook(self, name: str) -> None:
        """Note the gradients that its backward passes give from now on."""
        if not self._is_hooked:
            self._is_hooked, self.name = True, name
            if not hasattr(self.parameter, "to_local"):
                self.parameter.register_hook(self._arrived)

    def _arrived(self, gradient: Tensor) -> None:
        """Add up what this rank's backward passes give, before anything is sent."""
        grad, elements = self.parameter.grad, some_elements(gradient)
        if self._own is None and grad is not None and bool((grad != 0).any()):
            self._is_own_known = False
        self._own = elements if self._own is None else self._own + elements

    def begin_step(self) -> None:
        """Note its value."""
        self.before, self._elements = digest(self.parameter), some_elements(self.parameter)

    def is_clipped(self) -> str:
        """Note its gradient, which is about to be clipped for the first time, and return its digest."""
        assert self.parameter.grad is not None
        if self._unclipped is None:
            self._unclipped = some_elements(self.parameter.grad)
        return digest(self.parameter.grad)

    def gradient(self) -> dict[str, Any]:
        """The gradient that the optimizer uses, and what this rank's own samples gave."""
        grad, own, reduced = self.parameter.grad, self._own, self._unclipped
        if grad is None or own is None or not self._is_own_known:
            return {"digest": "none" if grad is None else digest(grad), "own": None, "reduced": None}
        reduced = some_elements(grad) if reduced is None else reduced
        return {"digest": digest(grad), "own": own.tolist(), "reduced": reduced.tolist()}

    def update(self) -> list[float]:
        """What the step has added to it."""
        return list((some_elements(self.parameter) - self._elements).tolist())

    def end_step(self) -> None:
        """Forget what was before the step."""
        self._own = self._unclipped = None
        self._is_own_known = True


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """For each parameter, the numbers of its group, such as its weight decay, but for those that a schedule changes."""
    largest = max((float(group["lr"]) for group in optimizer.param_groups if "lr" in group), default=0.0)
    return [
        {
            "elements": parameter.numel(),
            "a learning rate, as a part of the largest, of": float(group.get("lr", 0.0)) / (largest or 1.0),
            **{
                key: each
                for key, each in group.items()
                if isinstance(each, int | float | list | tuple) and key not in (*_SCHEDULED, "params")
            },
        }
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
