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

import math
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ddp_core.base.errors import UserError
from ddp_core.base.torch_internals import sent_together
from ddp_core.base.user_code import user_code
from ddp_core.observe.step import StepBatch, StepObserver

KINDS = ("kill", "pause", "raise", "nan", "slow", "exit", "stop", "pace", "flip", "flipweight")
_SLOW_SECONDS = 0.2
_PACE_SECONDS = 0.05
_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        found = re.fullmatch(rf"({'|'.join(KINDS)})@([0-9]+)(\+?)(?::([0-9]*))?", text)
        if found is None or (found[3] and found[1] != "flip"):
            raise UserError(
                f"--fault {text}: expected KIND@STEP[:RANK] with KIND one of {', '.join(KINDS)}, "
                "or flip@STEP+[:RANK] for a flip in every step from STEP on"
            )
        return cls(found[1], int(found[2]), int(found[4] or 0), bool(found[3]))

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
        self._flips: list[tuple[Node, RemovableHandle]] = []
        """The hooks that flip bits in this step, each with its node, which is kept by nobody else."""

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
        while self._flips:
            self._flips.pop()[1].remove()
        step = batch.step + 1
        for fault in self._due(step, ("flipweight",)):
            if self._model is not None and self._first_time(fault):
                # Through `.data`, because torch counts other writes, and a memory that loses a bit counts nothing.
                weight = _last_trained(self._model).data
                part = weight.to_local() if hasattr(weight, "to_local") else weight
                part.copy_(with_flipped_bit(part))
        for fault in self._due(step, ("kill", "pause", "raise", "slow", "exit")):
            if self._first_time(fault):
                if fault.kind in ("kill", "pause"):
                    os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
                elif fault.kind == "exit":
                    os._exit(1)
                elif fault.kind == "slow":
                    self._slow = True
                else:
                    # It stands for an exception of the user's code.
                    with user_code("a scripted fault"):
                        raise RuntimeError(f"scripted fault {fault}")
        if self._slow:
            time.sleep(_SLOW_SECONDS)
        if any(fault.kind == "pace" and fault.step <= step for fault in self._faults):
            time.sleep(_PACE_SECONDS)

    def _due(self, step: int, kinds: Sequence[str]) -> list[Fault]:
        return [fault for fault in self._faults if fault.step == step and fault.kind in kinds]

    def _flip_gradients(self, fault: Fault) -> None:
        """Flip a bit of the last trained parameter's gradient in the next backward, or where it goes on, in every one.

        Other replicas of the model, which share the hooks on its weights, are not hit.
        """
        has_struck = False

        def changed(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            nonlocal has_struck
            is_first, has_struck = not has_struck, True
            strikes = fault.goes_on or (is_first and self._first_time(fault))
            return tuple(map(with_flipped_bit, gradients)) if strikes else None

        if self._model is not None:
            # Not on the parameter: its hooks are also those of the other replicas.
            node = get_gradient_edge(_gets_gradient(self._model)).node
            self._flips.append((node, node.register_prehook(changed)))

    def _first_time(self, fault: Fault) -> bool:
        if self._directory is None:
            return True
        try:
            (self._directory / f".fault-{fault}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


@torch.no_grad()
def with_flipped_bit(tensor: Tensor) -> Tensor:
    """A copy in which the element that is largest, whatever its sign, has the highest bit of its fraction flipped."""
    # So the number stays finite, and no sum with others swallows the change.
    copy = tensor.detach().clone()
    if not copy.numel():
        return copy
    numbers = torch.view_as_real(copy) if copy.is_complex() else copy
    place = torch.unravel_index(numbers.abs().argmax(), numbers.shape)
    bit = round(-math.log2(torch.finfo(numbers.dtype).eps)) - 1
    one = numbers[place].reshape(1).view(_NUMBERS[numbers.element_size()])
    numbers[place] = (one ^ (1 << bit)).view(numbers.dtype)[0]
    return copy


def _last_trained(model: nn.Module) -> nn.Parameter:
    return [parameter for parameter in model.parameters() if parameter.requires_grad][-1]


def _gets_gradient(model: nn.Module) -> Tensor:
    """The last trained parameter; with --shard parameters the whole of it, while the model has this rank's part."""
    last = _last_trained(model)
    if not hasattr(last, "to_local"):
        return last
    from torch.distributed.fsdp import FSDPModule

    parts = (part for part in model.modules() if isinstance(part, FSDPModule))
    return next(whole for part in parts for own, whole in sent_together(part) if own is last)
