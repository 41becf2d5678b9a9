"""What all ranks must know of each step: the loss of every micro-batch, and whether a rank was asked to stop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.distributed.process_group import Collectives
from ddp_core.observe.step import StepBatch, StepReport


class StepSignals:
    """Small sums over the ranks in every step, which are computed while backward runs; one process needs none.

    Only one rank gives each loss and the others give zero, so the sum is exact and the report has the same bits on
    every layout. A NaN stays at the micro-batch that it came from.

    On the CPU one sum carries the losses and the requests to stop. On CUDA the losses stay on the device until `read`,
    so that the loop need not wait for the device in every step. There a second sum, of a CPU tensor over gloo, carries
    the requests, so that every rank follows them at the end of the same step. Not run on a GPU yet.
    """

    def __init__(self, collectives: Collectives, micro_batches: int) -> None:
        self._collectives = collectives
        self._micro_batches = micro_batches
        self._step = self._samples = 0
        self._by_micro_batch: dict[int, Tensor] = {}
        self._stop = False
        self._requests: Tensor | None = None
        self._sums: list[dist.Work] = []
        # On CUDA, the end of the last step's gradients.
        self._event: torch.cuda.Event | None = None
        # Of each step that has not been read: number, samples, micro-batches and their losses.
        self._unread: list[tuple[int, int, Sequence[int], Tensor]] = []

    def begin(self, batch: StepBatch) -> None:
        """Start a step."""
        self._step, self._samples = batch.step, batch.samples
        self._by_micro_batch = {}

    def put_loss(self, micro_batch: int, loss: Tensor) -> None:
        """Report the summed loss of one micro-batch."""
        self._by_micro_batch[micro_batch] = loss

    def send(self, stop: bool) -> None:
        """Start the sums; call this once per step on every rank, after its last forward.

        `stop` says whether this rank was asked to stop.
        """
        self._stop = stop
        if self._collectives.world.world_size == 1:
            losses = torch.stack(list(self._by_micro_batch.values()))
            self._unread.append((self._step, self._samples, list(self._by_micro_batch), losses))
            return
        device = self._collectives.device
        vector = torch.zeros(self._micro_batches + 1, device=device)
        for micro_batch, loss in self._by_micro_batch.items():
            vector[micro_batch] = loss
        self._requests = vector[-1:] if device.type == "cpu" else torch.zeros(1)
        if stop:
            self._requests.fill_(1.0)
        sent = [vector] if device.type == "cpu" else [self._requests, vector]
        begun = [self._collectives.start_sum(tensor) for tensor in sent]
        self._sums = [work for work in begun if work is not None]
        self._unread.append((self._step, self._samples, range(self._micro_batches), vector[:-1]))

    def receive(self) -> bool:
        """Wait for the sums of this step; whether any rank was asked to stop.

        Call this before anything that waits for the device. Where a peer is gone, the sum over gloo raises at once,
        while a wait for the device does not end as long as a kernel of NCCL waits for that peer.
        """
        for begun in self._sums:
            self._collectives.finish_sum(begun)
        self._sums = []
        if self._collectives.device.type == "cuda":
            self._keep_pace()
        return self._stop if self._requests is None else self._requests.item() > 0

    @property
    def losses(self) -> Tensor:
        """The losses of the step just received, on the device."""
        return self._unread[-1][3]

    def read(self) -> list[StepReport]:
        """The reports of the steps since the last call, oldest first."""
        if self._event is not None:
            self._collectives.await_event(self._event)
        values = iter(torch.cat([losses for *_, losses in self._unread]).tolist())
        reports = []
        for step, samples, micro_batches, _ in self._unread:
            row = [0.0] * self._micro_batches
            for micro_batch in micro_batches:
                row[micro_batch] = next(values)
            reports.append(StepReport(step, samples, row))
        self._unread.clear()
        return reports

    def _keep_pace(self) -> None:
        """Let the host run one step ahead of the device and no more.

        That keeps the device busy. A request to stop, or a lost peer, would otherwise be met only after all steps that
        the host has asked for since it last read the losses.
        """
        before, self._event = self._event, torch.cuda.Event()
        self._event.record()
        if before is not None:
            self._collectives.await_event(before)
