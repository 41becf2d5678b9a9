"""The losses of a step: summed over the ranks, and read by the host; and what is done where one is NaN or infinite.

The run then ends before the update, or the step is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.config.options import Options
from ddp_core.distributed.process_group import Collectives
from ddp_core.observe.step import StepBatch, StepObserver, StepReport
from ddp_core.trainers.batches import Batches
from ddp_core.trainers.job import Job
from ddp_core.trainers.saving import Saving
from ddp_core.trainers.train_state import TrainState

_REQUESTS = 2
"""So many counts are summed beside the losses: how many ranks shall leave, and on how many other parameters train."""


class StepLosses:
    """Sums every micro-batch's loss, and what ranks ask for, over the ranks, while backward runs.

    Only one rank gives each loss and the others give zero, so the sum is exact and the report has the same bits on
    every layout. A NaN stays at the micro-batch that it came from. A run of one process sums nothing.

    On the CPU one sum carries the losses and the requests. On CUDA the losses stay on the device until they are read,
    every `read_every` steps and wherever the step `may_save`, so that the loop need not wait for the device in every
    step, and a `gate` holds updates back. There a second sum, of a CPU tensor over gloo, carries the requests, so that
    every rank follows them at the end of the same step. `tell_wait` is called before this rank waits for others.
    """

    def __init__(
        self,
        collectives: Collectives,
        micro_batches: int,
        may_save: Callable[[int], bool],
        read_every: int = 1,
        gate: LossGate | None = None,
    ) -> None:
        self._collectives, self._micro_batches = collectives, micro_batches
        self._may_save, self._read_every, self._gate = may_save, read_every, gate
        self.tell_wait: Callable[[], None] = lambda: None
        self._by_micro_batch: dict[int, Tensor] = {}
        self._requests = torch.zeros(_REQUESTS, dtype=torch.float64)
        self._sums: list[dist.Work] = []
        # On CUDA, the end of the last step's gradients.
        self._event: torch.cuda.Event | None = None
        # Each step that has not been read: its number, samples, divisor, micro-batches and their losses.
        self._unread: list[tuple[int, int, int, Sequence[int], Tensor]] = []

    def put(self, micro_batch: int, loss: Tensor) -> None:
        """Take the loss of one micro-batch, summed over its samples."""
        self._by_micro_batch[micro_batch] = loss

    def send(self, batch: StepBatch, leaves: bool) -> None:
        """Start the sums of a step; call this once per step on every rank, after its last forward.

        `leaves` says whether this rank was asked to leave at the end of the step.
        """
        self.tell_wait()
        own, self._by_micro_batch = self._by_micro_batch, {}
        if self._collectives.world.world_size == 1:
            if leaves:  # which this process then does, so that nobody takes it back
                self._requests[0] = 1
            self._unread.append((batch.step, batch.samples, batch.divisor, list(own), torch.stack(list(own.values()))))
            return
        vector = self._zeros()
        for micro_batch, loss in own.items():
            vector[micro_batch] = loss
        self._start_sums(vector, leaves=leaves)
        self._unread.append((batch.step, batch.samples, batch.divisor, range(self._micro_batches), vector[:-_REQUESTS]))

    def all_retrain(self) -> bool:
        """Whether every rank calls this now, because other parameters train there, and none goes on to `send`.

        A rank that calls `send` meanwhile loses this one, or raises in `receive`.
        """
        world = self._collectives.world
        if world.world_size == 1:
            return True
        self._start_sums(self._zeros(), retrains=True)
        self._finish_sums()
        return bool(self._requests[1] == world.world_size)

    def _zeros(self) -> Tensor:
        # A loss of any type is exact in it, so ranks report what one process does.
        return torch.zeros(self._micro_batches + _REQUESTS, dtype=torch.float64, device=self._collectives.device)

    def _start_sums(self, vector: Tensor, leaves: bool = False, retrains: bool = False) -> None:
        is_on_cpu = self._collectives.device.type == "cpu"
        self._requests = vector[-_REQUESTS:] if is_on_cpu else torch.zeros(_REQUESTS, dtype=torch.float64)
        for number, is_asked in enumerate((leaves, retrains)):
            if is_asked:
                self._requests[number] = 1
        sent = [vector] if is_on_cpu else [self._requests, *([] if retrains else [vector])]
        begun = [self._collectives.start_sum(each) for each in sent]
        self._sums = [work for work in begun if work is not None]

    def _finish_sums(self) -> None:
        for begun in self._sums:
            self._collectives.finish_sum(begun)
        self._sums = []

    def receive(self, batch: StepBatch) -> tuple[bool, list[StepReport]]:
        """Wait for the sums of this step; whether any rank leaves, and the reports that are read now, oldest first.

        Call this before anything that waits for the device. Where a peer is gone, the sum over gloo raises at once,
        while a wait for the device does not end as long as a kernel of NCCL waits for that peer. Raises UserError where
        another rank trains other parameters.
        """
        self._finish_sums()
        leaves, retrains = map(bool, self._requests.tolist())
        if retrains:
            place = self._collectives.world.place
            raise not_on_all(f"step {batch.step + 1}, {place}: other ranks train other parameters now")
        self._pace()
        if self._gate is not None:
            self._gate.see(self._unread[-1][-1])
        done = batch.step + 1
        # Losses are read before every save, so that no checkpoint is saved after a bad loss.
        is_due = leaves or done % self._read_every == 0 or self._may_save(done)
        return leaves, self.read() if is_due else []

    def await_device(self) -> None:
        """Wait until the device has done what it was asked for; call this before anything else waits for it in a step.

        What is sent from the device may wait for a peer that is gone, which only this wait watches for.
        """
        if self._collectives.device.type == "cuda":
            now = torch.cuda.Event()
            now.record()
            self._collectives.await_event(now)

    def _pace(self) -> None:
        """On CUDA, wait until the device is done with the step before, so that the host runs one step ahead.

        That keeps the device busy. A request to stop, or a lost peer, would otherwise be met only after all steps that
        the host has asked for since it last read the losses. In a live recovery it does not run ahead.
        """
        if self._collectives.device.type != "cuda":
            return
        before, self._event = self._event, torch.cuda.Event()
        self._event.record()
        self._collectives.await_step(before, self._event)

    def read(self) -> list[StepReport]:
        """The reports of the steps since the last call, oldest first."""
        if not self._unread:
            return []
        if self._event is not None:
            self._collectives.await_event(self._event)
        unread = [losses for *_, losses in self._unread]
        values = iter((unread[0] if len(unread) == 1 else torch.cat(unread)).tolist())
        reports = []
        for step, samples, divisor, micro_batches, _ in self._unread:
            row = [0.0] * self._micro_batches
            for micro_batch in micro_batches:
                row[micro_batch] = next(values)
            reports.append(StepReport(step, samples, divisor, row))
        self._unread.clear()
        return reports


def not_on_all(what: str) -> UserError:
    """The error where the ranks do not train the same parameters any more."""
    return UserError(
        f'{what}: a callback that changes requires_grad needs `ranks = "all"` and must do the same on each rank'
    )


_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def steps_between_reading(options: Options, state: TrainState, collectives: Collectives) -> int:
    """After how many steps the host reads the losses: `log_every` on CUDA, where reading makes it wait for the device.

    1 on the CPU, where the host waits for each step all the same, and wherever a LossGate cannot hold an update back:
    with an optimizer that is not one of torch's fused ones, and where bad steps are to be skipped. A schedule of the
    experiment's own goes on after a bad loss; nobody sees that, since the run ends where the loss is read, before
    anything is saved.
    """
    groups = state.optimizer.param_groups
    holds_back = type(state.optimizer) in _FUSED and all(group.get("fused") for group in groups)
    reads_late = collectives.device.type != "cpu" and collectives.runs_ahead and options.on_nan != "skip" and holds_back
    return options.log_every if reads_late else 1


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


def end_or_skip(job: Job, batches: Batches, saving: Saving, report: StepReport, done: int) -> None:
    """Raise UserError (5) for the report of such a loss, or say that its step is skipped, where that was asked for.

    It was read after the gradients of `done` steps. The line names the first such micro-batch, its rank or replica, and
    up to 16 sample ids.
    """
    parts = batches.cut.parts(report.samples)
    first = next((part for part in parts if not math.isfinite(report.losses[part.index])), None)
    if first is None:  # each is finite, but not their sum
        named = f"the loss is not finite at step {report.step + 1}"
    else:
        owner, layout = batches.owner(report.step, first.index), job.layout
        place = f"replica {owner}" if layout.kind == "dp" else f"rank {owner} (node {owner // layout.nproc_per_node})"
        ids = ", ".join(str(number) for number in batches.ids(report.step, first)[:16])
        named = f"loss is {report.losses[first.index]} at step {report.step + 1} on {place}, sample ids {ids}"
    if job.options.on_nan == "skip":
        job.console.say(f"{named}; step skipped")
        return
    seen = f" (seen after step {done}, no update was made since)" if done > report.step + 1 else ""
    raise UserError(
        f"{named}; stopped before the optimizer step{seen}, {saving.newest}: look at these samples, lower "
        "optimizer.lr, or use --on-nan skip",
        ExitCode.NUMERICS,
    )


class BufferCopies(StepObserver):
    """Keeps the buffers of each step's beginning; they come back where the step is skipped, or dropped.

    A forward changes buffers, such as batch-norm statistics, before anybody knows whether its step counts.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state

    def before_step(self, batch: StepBatch) -> None:
        self._state.keep_buffers()

    def skipped(self, batch: StepBatch) -> None:
        self._state.put_back_buffers()
