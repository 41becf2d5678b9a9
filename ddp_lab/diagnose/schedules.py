"""The schedules of a diagnosed script: when each moves on, and where it ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.optim import lr_scheduler

from ddp_lab.diagnose.recorder import Recorder, site, wrap

_LONGEST = 20_000
"""In steps; the end of a longer schedule is not looked for."""
_FADED = 1e-6
"""So small a part of its highest rate is rounding, and a schedule that ends has not come to it before its last move."""


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
    """After how many moves a schedule's rate is the lowest for the first time; 0 where it has no such end.

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
