"""What all ranks must know of each step: the loss of every micro-batch, and whether anyone wants to stop."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_core.distributed.process_group import Collectives


@dataclass(frozen=True)
class StepReport:
    """The same on every rank: summed loss of each micro-batch of the step, and whether a rank asked to stop."""

    losses: list[float]
    stop: bool


class StepSignals:
    """One small sum per step, on its way while backward runs; one process alone needs none.

    Each loss is given by one rank and added to zeros, so the sum is exact and the report bit-identical on every
    layout; a NaN stays at the micro-batch it came from. On CUDA the values stay on the device until `read`, so that the
    loop need not wait for it at every step.
    """

    def __init__(self, collectives: Collectives, micro_batches: int) -> None:
        self._collectives = collectives
        self._micro_batches = micro_batches
        self._alone = collectives.world.world_size == 1
        self._losses: dict[int, torch.Tensor] = {}
        self._work: dist.Work | None = None
        self._unread: list[tuple[dict[int, torch.Tensor], bool]] = []
        self._unread_sums: list[torch.Tensor] = []

    def begin(self) -> None:
        """Forget the step before."""
        self._losses = {}

    def put_loss(self, micro_batch: int, loss: torch.Tensor) -> None:
        """Report the summed loss of one micro-batch."""
        self._losses[micro_batch] = loss

    def send(self, stop: bool) -> None:
        """Start the sum; call once per step on every rank, after its last forward."""
        if self._alone:
            self._unread.append((self._losses, stop))
            return
        vector = torch.zeros(self._micro_batches + 1, device=self._collectives.device)
        for micro_batch, loss in self._losses.items():
            vector[micro_batch] = loss
        if stop:
            vector[-1] = 1.0
        self._work = self._collectives.start_sum(vector)
        self._unread_sums.append(vector)

    def receive(self) -> None:
        """Wait for the sum of this step."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def read(self) -> list[StepReport]:
        """The reports of the steps since the last call, oldest first."""
        reports = [StepReport(self._values(losses), stop) for losses, stop in self._unread]
        if self._unread_sums:
            rows = torch.stack(self._unread_sums).tolist()
            reports += [StepReport(row[:-1], row[-1] > 0) for row in rows]
        self._unread.clear()
        self._unread_sums.clear()
        return reports

    def _values(self, losses: dict[int, torch.Tensor]) -> list[float]:
        values = [0.0] * self._micro_batches
        tensors = list(losses.values())
        read = torch.stack(tensors).tolist() if len(tensors) > 1 else [tensors[0].item()]
        for micro_batch, value in zip(losses, read, strict=True):
            values[micro_batch] = value
        return values
