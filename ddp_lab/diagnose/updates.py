"""What a diagnosed script updates by: its parameters, the settings of its optimizers, and its schedules."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler

from ddp_lab.diagnose.recorder import Recorder, digest, site, some_elements, wrap

_SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas", "base_momentum", "max_momentum")
"""Settings of an optimizer that schedules change."""
_LONGEST = 20_000
"""In steps; the end of a longer schedule is not looked for."""
_FADED = 1e-6
"""A rate below this part of the highest is zero but for rounding; one that is so small before the last move fades."""


class Watched:
    """A parameter, and what has happened to it since the last step; its name is that in the first model with it."""

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


class Schedules:
    """Writes an event for each move."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: dict[int, Any] = {}
        self._is_moving = False

    def install(self) -> None:
        """Wrap `step` of all kinds of schedules."""
        for kind in vars(lr_scheduler).values():
            if isinstance(kind, type) and "step" in vars(kind):
                wrap(kind, "step", self._move)

    def _move(self, step: Callable[..., Any], schedule: Any, *words: Any, **named: Any) -> Any:
        if self._is_moving:  # one that is made of others
            return step(schedule, *words, **named)
        self._is_moving = True
        try:
            return step(schedule, *words, **named)
        finally:
            self._is_moving = False
            self._known[id(schedule)] = schedule
            self._recorder.write("schedule", site=site(), kind=type(schedule).__name__)

    def ends(self) -> list[int]:
        """Where each ends; they are of no use afterwards."""
        self._is_moving = True  # what moves on now is no event
        return [end_of(each) for each in self._known.values()]


def end_of(schedule: Any) -> int:
    """After how many moves a schedule's rate first has its lowest value; 0 if it has no such end.

    A rate that only fades away has none. The schedule moves on, so it and its optimizer are of no use afterwards.
    """
    rates: list[float] = []
    moves, is_over = getattr(schedule, "last_epoch", 0), 1
    with suppress(Exception), warnings.catch_warnings(action="ignore"):
        while len(rates) < _LONGEST:
            rates.append(float(schedule.optimizer.param_groups[0]["lr"]))
            schedule.step()
        is_over = 0
    if not rates:  # a script's own schedule may have another optimizer, or none
        return 0
    nothing = _FADED * max(rates)
    end = next(at for at, rate in enumerate(rates) if rate <= min(rates) + nothing)
    if not 0 < end < _LONGEST - 1 or rates[end - 1] <= 2 * nothing:
        return 0
    return moves + end + is_over  # OneCycleLR is over with its lowest rate: one move more is an error
