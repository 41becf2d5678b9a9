"""What is done about a loss that is NaN or infinite: say where it came from, and undo what a skipped step changed."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ddp_core.config.layout import Layout
from ddp_core.observe.step import StepBatch, StepObserver, StepReport
from ddp_core.trainers.batches import Batches


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
