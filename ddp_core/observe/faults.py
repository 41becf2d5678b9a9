"""Faults scripted as data: what goes wrong, at which step, on which rank. For tests and drills; a normal run has none.

`kill@60` kills rank 0 with SIGKILL after step 60. `pause@60:2` stops rank 2 (SIGSTOP) after step 60. `raise@60:1`
raises an exception in rank 1 after step 60. `exit@60` ends rank 0 at once, with code 1, after step 60. `nan@60:3` makes
an input of rank 3 NaN in step 60. `slow@60:1` makes each step of rank 1 0.2 s longer from step 60 on. Each of these
happens once per run directory, so that a repeated step is not hit again. `pace@1` makes each step of rank 0 0.05 s
longer from step 1 on, also after a restart, so that a drill's run lasts long enough on any machine.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_core.base.errors import UserError
from ddp_core.base.user_code import user_code
from ddp_core.observe.step import StepBatch, StepObserver

KINDS = ("kill", "pause", "raise", "nan", "slow", "exit", "pace")
_SLOW_SECONDS = 0.2
_PACE_SECONDS = 0.05


@dataclass(frozen=True)
class Fault:
    """One fault, as `kind@step:rank`."""

    kind: str
    step: int
    rank: int = 0

    @classmethod
    def parse(cls, text: str) -> Fault:
        """The fault that `text` names. Raises UserError, with the expected form, where it names none."""
        kind, _, place = text.partition("@")
        step, _, rank = place.partition(":")
        if kind not in KINDS or not step.isdigit() or not (rank or "0").isdigit():
            raise UserError(f"--fault {text}: expected KIND@STEP[:RANK] with KIND one of {', '.join(KINDS)}")
        return cls(kind, int(step), int(rank or 0))

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}:{self.rank}"


class FaultScript(StepObserver):
    """Makes the faults of one rank happen: `nan` before its step is computed, the others after their step.

    Without a `directory` nothing is noted, and a fault happens each time its step is trained.
    """

    def __init__(self, faults: Sequence[str] = (), rank: int = 0, directory: Path | None = None) -> None:
        self._faults = [fault for fault in map(Fault.parse, faults) if fault.rank == rank]
        self._directory = directory
        self._slow = False

    def before_step(self, batch: StepBatch) -> None:
        for fault in self._due(batch.step + 1, ("nan",)):
            if batch.tensors and self._first_time(fault):
                inputs, _ = batch.tensors[0]
                inputs.fill_(float("nan"))

    def after_step(self, batch: StepBatch) -> None:
        step = batch.step + 1
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
