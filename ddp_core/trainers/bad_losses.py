"""What is done about a loss that is NaN or infinite: say where it came from, and undo what a skipped step changed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ddp_core.config.layout import Layout
from ddp_core.config.options import Options
from ddp_core.observe.step import StepBatch, StepObserver, StepReport
from ddp_core.trainers.batches import Batches
from ddp_core.trainers.train_state import TrainState


def first_bad(reports: Iterable[StepReport]) -> StepReport | None:
    """The first step with a loss that is NaN or infinite; None where all are finite."""
    return next((report for report in reports if not report.is_finite), None)


def name_bad_loss(report: StepReport, batches: Batches, layout: Layout) -> str:
    """A line about the first micro-batch whose loss is not finite: its rank (or replica) and up to 16 sample ids."""
    parts = batches.cut.parts(report.samples)
    first = next((part for part in parts if not math.isfinite(report.losses[part.index])), None)
    if first is None:
        return f"the loss is not finite at step {report.step + 1}"
    owner = batches.owner(report.step, first.index)
    place = f"replica {owner}" if layout.kind == "dp" else f"rank {owner} (node {owner // layout.nproc_per_node})"
    ids = ", ".join(str(number) for number in batches.ids(report.step, first)[:16])
    return f"loss is {report.losses[first.index]} at step {report.step + 1} on {place}, sample ids {ids}"


class BufferCopies(StepObserver):
    """Puts back the buffers (batch-norm statistics, for example) that the forward passes of a skipped step changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: list[Tensor] = []

    def before_step(self, batch: StepBatch) -> None:
        self._before = [buffer.clone() for buffer in self._model.buffers()]

    @torch.no_grad()
    def skipped(self, batch: StepBatch) -> None:
        for buffer, value in zip(self._model.buffers(), self._before, strict=True):
            buffer.copy_(value)


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
