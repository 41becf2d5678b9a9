"""Faults scripted as data: what goes wrong, at which step, on which rank. For tests and drills; a normal run has none.

`kill@60` kills rank 0 with SIGKILL after step 60. `pause@60:2` stops rank 2 (SIGSTOP) after step 60. `raise@60:1`
raises an exception in rank 1 after step 60. `exit@60` ends rank 0 at once, with code 1, after step 60. `stop@60` asks
rank 0 in step 60 to save and stop (SIGTERM). `nan@60:3` makes an input of rank 3 NaN in step 60. `slow@60:1` makes each
step of rank 1 0.2 s longer from step 60 on. `flip@60:1` flips one bit of a gradient in the first backward of rank 1 in
step 60, and `flipweight@60:1` one bit of a weight of rank 1 after the update of step 60, as a machine does that
computes or remembers wrongly. Each of these happens once per run directory, so that a repeated step is not hit again.

Two go on, also after a restart: `flip@60+:1` flips a bit in every backward of rank 1 from step 60 on, and `pace@1`
makes each step of rank 0 0.05 s longer from step 1 on, so that a drill's run lasts long enough on any machine.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_core.base.errors import UserError
from ddp_core.base.user_code import user_code
from ddp_core.observe.step import StepBatch, StepObserver

if TYPE_CHECKING:
    from torch import nn

KINDS = ("kill", "pause", "raise", "nan", "slow", "exit", "stop", "pace", "flip", "flipweight")
_SLOW_SECONDS = 0.2
_PACE_SECONDS = 0.05


@dataclass(frozen=True)
class Fault:
    """One fault, as `kind@step:rank`; a flip may go on from its step: `flip@step+:rank`."""

    kind: str
    step: int
    rank: int = 0
    goes_on: bool = False

    @classmethod
    def parse(cls, text: str) -> Fault:
        """The fault that `text` names. Raises UserError, with the expected form, where it names none."""
        kind, _, place = text.partition("@")
        step, _, rank = place.partition(":")
        first = step.removesuffix("+")
        if (
            kind not in KINDS
            or not first.isdigit()
            or not (rank or "0").isdigit()
            or (first != step and kind != "flip")
        ):
            raise UserError(
                f"--fault {text}: expected KIND@STEP[:RANK] with KIND one of {', '.join(KINDS)}, "
                "or flip@STEP+[:RANK] for a flip in every step from STEP on"
            )
        return cls(kind, int(first), int(rank or 0), first != step)

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}{'+' if self.goes_on else ''}:{self.rank}"


class FaultScript(StepObserver):
    """Makes the faults of one rank happen: `nan`, `stop` and `flip` in their step, the others after it.

    Bits are flipped in `model`, which must be what this rank trains; in `dp` it is the first replica. Without a
    `directory` nothing is noted, and a fault happens each time its step is trained.
    """

    def __init__(
        self,
        faults: Sequence[str] = (),
        rank: int = 0,
        directory: Path | None = None,
        model: nn.Module | None = None,
    ) -> None:
        self._faults = [fault for fault in map(Fault.parse, faults) if fault.rank == rank]
        self._directory, self._model = directory, model
        self._slow = False
        self._end_flips: list[Callable[[], None]] = []

    def before_step(self, batch: StepBatch) -> None:
        step = batch.step + 1
        for fault in self._due(step, ("nan",)):
            if batch.tensors and self._first_time(fault):
                inputs, _ = batch.tensors[0]
                inputs.fill_(float("nan"))
        for fault in self._due(step, ("stop",)):
            if self._first_time(fault):
                os.kill(os.getpid(), signal.SIGTERM)
        for fault in self._faults:
            if fault.kind == "flip" and (fault.step == step or (fault.goes_on and fault.step < step)):
                self._flip_gradients(fault)

    def after_step(self, batch: StepBatch) -> None:
        while self._end_flips:
            self._end_flips.pop()()
        step = batch.step + 1
        for fault in self._due(step, ("flipweight",)):
            if self._model is not None and self._first_time(fault):
                from ddp_core.observe.flips import flip_weight

                flip_weight(self._model)
        for fault in self._due(step, ("kill", "pause", "raise", "slow", "exit")):
            if self._first_time(fault):
                # A scripted exception stands for one of the user's code.
                with user_code("a scripted fault"):
                    self._strike(fault)
        if self._slow:
            time.sleep(_SLOW_SECONDS)
        if any(fault.kind == "pace" and fault.step <= step for fault in self._faults):
            time.sleep(_PACE_SECONDS)

    def _due(self, step: int, kinds: Sequence[str]) -> list[Fault]:
        return [fault for fault in self._faults if fault.step == step and fault.kind in kinds]

    def _flip_gradients(self, fault: Fault) -> None:
        """Flip a bit in the next backward, or in every one of this step where the fault goes on."""
        from ddp_core.observe.flips import flip_gradients

        has_struck = False

        def strikes() -> bool:
            nonlocal has_struck
            if fault.goes_on:
                return True
            if has_struck:
                return False
            has_struck = True
            return self._first_time(fault)

        if self._model is not None:
            self._end_flips.append(flip_gradients(self._model, strikes))

    def _first_time(self, fault: Fault) -> bool:
        if self._directory is None:
            return True
        try:
            (self._directory / f".fault-{fault}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _strike(self, fault: Fault) -> None:
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "pause":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "exit":
            os._exit(1)
        elif fault.kind == "slow":
            self._slow = True
        else:
            raise RuntimeError(f"scripted fault {fault}")
