"""The losses of a step: summed over the ranks, read by the host, and what is done where one is NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.config.layout import Layout
from ddp_core.config.options import Options
from ddp_core.distributed.process_group import Collectives
from ddp_core.observe.step import StepBatch, StepObserver, StepReport
from ddp_core.trainers.batches import Batches
from ddp_core.trainers.train_state import TrainState

_JOINED = 1024.0
"""Sent in the place of a request to stop, which is 0 or 1, to ask whether every rank joins."""


class StepLosses:
    """Sums every micro-batch's loss, and the requests to stop, over the ranks, while backward runs.

    Only one rank gives each loss and the others give zero, so the sum is exact and the report has the same bits on
    every layout. A NaN stays at the micro-batch that it came from. A run of one process sums nothing.

    On the CPU one sum carries the losses and the requests to stop. On CUDA the losses stay on the device until `read`,
    so that the loop need not wait for the device in every step. There a second sum, of a CPU tensor over gloo, carries
    the requests, so that every rank follows them at the end of the same step.
    """

    def __init__(self, collectives: Collectives, micro_batches: int) -> None:
        self._collectives = collectives
        self._micro_batches = micro_batches
        self._by_micro_batch: dict[int, Tensor] = {}
        self._stop = False
        self._requests: Tensor | None = None
        self._sums: list[dist.Work] = []
        # On CUDA, the end of the last step's gradients.
        self._event: torch.cuda.Event | None = None
        # Of each step that has not been read: number, samples, micro-batches and their losses.
        self._unread: list[tuple[int, int, Sequence[int], Tensor]] = []

    def put(self, micro_batch: int, loss: Tensor) -> None:
        """Take the loss of one micro-batch, summed over its samples."""
        self._by_micro_batch[micro_batch] = loss

    def send(self, batch: StepBatch, stop: bool) -> None:
        """Start the sums of a step; call this once per step on every rank, after its last forward.

        `stop` says whether this rank was asked to stop.
        """
        self._stop = stop
        own = self._by_micro_batch
        self._by_micro_batch = {}
        if self._collectives.world.world_size == 1:
            self._unread.append((batch.step, batch.samples, list(own), torch.stack(list(own.values()))))
            return
        device = self._collectives.device
        # A loss of any type is exact in it, so ranks report what one process does.
        vector = torch.zeros(self._micro_batches + 1, dtype=torch.float64, device=device)
        for micro_batch, loss in own.items():
            vector[micro_batch] = loss
        self._requests = vector[-1:] if device.type == "cpu" else torch.zeros(1, dtype=torch.float64)
        self._requests.fill_(stop)
        sent = [vector] if device.type == "cpu" else [self._requests, vector]
        begun = [self._collectives.start_sum(tensor) for tensor in sent]
        self._sums = [work for work in begun if work is not None]
        self._unread.append((batch.step, batch.samples, range(self._micro_batches), vector[:-1]))

    def all_join(self) -> bool:
        """Whether every rank calls this now, and none goes on to `send`; where one does, its sum is spoilt.

        So a rank can ask the others about something that has happened to it, without a sum of its own in every step.
        """
        world = self._collectives.world
        if world.world_size == 1:
            return True
        on_cpu = self._collectives.device.type == "cpu"
        # What `send` sums first.
        joined = torch.zeros(self._micro_batches + 1 if on_cpu else 1, dtype=torch.float64)
        joined[-1] = _JOINED
        return self._collectives.sum_(joined)[-1].item() == _JOINED * world.world_size

    def receive(self) -> bool:
        """Wait for the sums of this step; whether any rank was asked to stop.

        Call this before anything that waits for the device. Where a peer is gone, the sum over gloo raises at once,
        while a wait for the device does not end as long as a kernel of NCCL waits for that peer.
        """
        for begun in self._sums:
            self._collectives.finish_sum(begun)
        self._sums = []
        if self._collectives.device.type == "cuda":
            # The host runs one step ahead of the device and no more. That keeps the device busy. A request to stop, or
            # a lost peer, would otherwise be met only after all steps that the host has asked for since it last read
            # the losses. In a live recovery it does not run ahead: an update may not follow an exchange that failed.
            before, self._event = self._event, torch.cuda.Event()
            self._event.record()
            if self._collectives.world.is_live:
                self._collectives.await_all(self._event)
            elif before is not None:
                self._collectives.await_event(before)
        if self._requests is None:
            return self._stop
        return self._requests.item() > 0

    @property
    def newest(self) -> Tensor:
        """The losses of the step just received, on the device."""
        return self._unread[-1][3]

    def read(self) -> list[StepReport]:
        """The reports of the steps since the last call, oldest first."""
        if not self._unread:
            return []
        if self._event is not None:
            self._collectives.await_event(self._event)
        unread = [losses for *_, losses in self._unread]
        values = iter((unread[0] if len(unread) == 1 else torch.cat(unread)).tolist())
        reports = []
        for step, samples, micro_batches, _ in self._unread:
            row = [0.0] * self._micro_batches
            for micro_batch in micro_batches:
                row[micro_batch] = next(values)
            reports.append(StepReport(step, samples, row))
        self._unread.clear()
        return reports


_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def steps_between_reading(options: Options, state: TrainState, device: torch.device, is_live: bool = False) -> int:
    """After how many steps the host reads the losses: `log_every` on CUDA, where reading makes it wait for the device.

    1 on the CPU, in a live recovery, which waits all the same, and wherever a LossGate cannot hold an update back: with
    an optimizer that is not one of torch's fused ones, and where bad steps are to be skipped. A schedule of the
    experiment's own goes on after a bad loss; nobody sees that, since the run ends where the loss is read, before
    anything is saved.
    """
    groups = state.optimizer.param_groups
    holds_back = type(state.optimizer) in _FUSED and all(group.get("fused") for group in groups)
    if device.type == "cpu" or is_live or options.on_nan == "skip" or not holds_back:
        return 1
    return options.log_every


class LossGate:
    """Lets no update through from the first loss on that is not finite, without a word from the host.

    The fused optimizers of torch change neither weights nor their own state where their `found_inf`, a number on the
    device, is exactly 1: so the gate takes the larger of its own and a GradScaler's `found_inf`, not their sum. The
    host learns of the loss when it reads the losses.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.closed = torch.zeros((), device=device)
        """1 from the first loss on that is not finite, else 0."""
        optimizer.register_step_pre_hook(self._before_step)

    def see(self, losses: Tensor) -> None:
        """Take in a step's losses, before its update."""
        self.closed.masked_fill_(losses.isfinite().all().logical_not(), 1.0)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        # A GradScaler sets `found_inf` for the step that it makes, and removes it afterwards.
        found = getattr(optimizer, "found_inf", self.closed)
        optimizer.found_inf = torch.maximum(found, self.closed)


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
    """Puts back the buffers (batch-norm statistics, for example) that a skipped or unfinished step has changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: list[Tensor] = []
        self.step = -1
        """The step whose beginning is kept, counted from 0."""

    def before_step(self, batch: StepBatch) -> None:
        self.step = batch.step
        self._before = [buffer.clone() for buffer in self._model.buffers()]

    def skipped(self, batch: StepBatch) -> None:
        self.put_back()

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the buffers the values of the step's beginning."""
        for buffer, value in zip(self._model.buffers(), self._before, strict=True):
            buffer.copy_(value)
