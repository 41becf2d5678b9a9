"""What all ranks must know of each step: the loss of every micro-batch, and whether a rank was asked to stop."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddp_core.distributed.process_group import Collectives
from ddp_core.observe.step import StepBatch, StepReport


class StepSignals:
    """One small sum over the ranks per step, which is computed while backward runs; a single process needs none.

    Only one rank gives each loss and the others give zero, so the sum is exact and the report has the same bits on
    every layout. A NaN stays at the micro-batch that it came from. On CUDA the values stay on the device until `read`,
    so that the loop need not wait for the device at every step.
    """

    def __init__(self, collectives: Collectives, micro_batches: int) -> None:
        self._collectives = collectives
        self._micro_batches = micro_batches
        self._alone = collectives.world.world_size == 1
        self._step = self._samples = 0
        self._losses: dict[int, torch.Tensor] = {}
        self._sum: dist.Work | None = None
        # Both lists hold the steps that have not been read. A single process keeps number, samples, losses and the
        # request to stop; several keep number, samples, and the sum over ranks of losses and requests.
        self._unread: list[tuple[int, int, dict[int, torch.Tensor], bool]] = []
        self._unread_sums: list[tuple[int, int, torch.Tensor]] = []

    def begin(self, batch: StepBatch) -> None:
        """Start a step."""
        self._step, self._samples = batch.step, batch.samples
        self._losses = {}

    def put_loss(self, micro_batch: int, loss: torch.Tensor) -> None:
        """Report the summed loss of one micro-batch."""
        self._losses[micro_batch] = loss

    def send(self, stop: bool) -> None:
        """Start the sum; call this once per step on every rank, after its last forward.

        `stop` says whether this rank was asked to stop.
        """
        if self._alone:
            self._unread.append((self._step, self._samples, self._losses, stop))
            return
        vector = torch.zeros(self._micro_batches + 1, device=self._collectives.device)
        for micro_batch, loss in self._losses.items():
            vector[micro_batch] = loss
        if stop:
            vector[-1] = 1.0
        self._sum = self._collectives.start_sum(vector)
        self._unread_sums.append((self._step, self._samples, vector))

    def receive(self) -> None:
        """Wait for the sum of this step."""
        if self._sum is not None:
            self._collectives.finish_sum(self._sum)
            self._sum = None

    def read(self) -> list[StepReport]:
        """The reports of the steps since the last call, oldest first."""
        reports = [
            StepReport(step, samples, self._values(losses), stop) for step, samples, losses, stop in self._unread
        ]
        if self._unread_sums:
            rows = torch.stack([vector for *_, vector in self._unread_sums]).tolist()
            reports += [
                StepReport(step, samples, row[:-1], row[-1] > 0)
                for (step, samples, _), row in zip(self._unread_sums, rows, strict=True)
            ]
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
