"""The loop that every layout shares: load, compute gradients, update, record, evaluate, save."""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ddp_core.checkpoint import Checkpointer
from ddp_core.data.loader import Loader
from ddp_core.data.splits import Splits
from ddp_core.determinism.digests import weights_digest
from ddp_core.determinism.seeds import MicroBatchSeed
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.stop import ASKED_ELSEWHERE, Stopped, StopRequest
from ddp_core.errors import ExitCode, UserError
from ddp_core.faults import FaultScript
from ddp_core.model.losses import Loss
from ddp_core.model.optimizers import build_optimizer
from ddp_core.observe.heartbeat import Heartbeat
from ddp_core.observe.ledger import Ledger
from ddp_core.observe.metrics import Console, MetricsWriter
from ddp_core.observe.profiling import StepProfiler
from ddp_core.spec.cut import BatchCut
from ddp_core.spec.experiment import Experiment
from ddp_core.spec.layout import Layout
from ddp_core.spec.options import Options
from ddp_core.trainers.batches import Batches, StepBatch
from ddp_core.trainers.clock import StepClock
from ddp_core.trainers.evaluation import evaluate
from ddp_core.trainers.signals import StepReport, StepSignals
from ddp_core.trainers.state import TrainState
from ddp_core.trainers.watch import Watch

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Job:
    """What a trainer is given: the experiment with what was built from it, the layout, and where to speak and write."""

    experiment: Experiment
    layout: Layout
    options: Options
    model: nn.Module
    loss: Loss
    splits: Splits
    collectives: Collectives
    device: torch.device
    console: Console
    metrics: MetricsWriter
    stop: StopRequest
    hits: Loss | None = None
    """Counts right answers, for accuracy; None where there is no such thing."""
    faults: FaultScript = field(default_factory=FaultScript)
    profiler: StepProfiler | None = None
    heartbeat: Heartbeat | None = None
    ledger: Ledger | None = None


class Trainer(ABC):
    """One experiment on one layout; subclasses say how one step's gradients come about.

    After `train` the model holds the final weights and `state` everything that a checkpoint does.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.experiment, self.options, self.device = job.experiment, job.options, job.device
        self.exact = job.options.reduction == "exact"
        self.model = job.model.to(job.device)
        self.cut = BatchCut.of(job.experiment, job.layout)
        loader = Loader(
            job.splits.train,
            job.splits.augmentation,
            job.experiment.seed,
            workers=job.options.workers,
            pin_memory=job.device.type == "cuda",
        )
        self.batches = Batches(job.experiment, self.cut, len(job.splits.train), loader, self.shares())
        self.steps_per_epoch = self.batches.steps_per_epoch
        self.total_steps = job.experiment.total_steps(self.steps_per_epoch)
        self.seed_micro_batch = MicroBatchSeed(job.experiment.seed, job.device)
        self.signals = StepSignals(job.collectives, self.cut.micro_batches)
        self.precision = _PRECISIONS.get(job.experiment.precision)
        # torch's 2**16 is meant for a mean; the exact backward starts from a sum over samples.
        scale = 2.0 ** (16 - (job.experiment.global_batch_size.bit_length() if self.exact else 0))
        scaler = torch.amp.GradScaler(job.device.type, scale) if self.precision is torch.float16 else None
        self.state = TrainState(self.model, build_optimizer(job.experiment.optimizer, self.model), scaler)
        self.checkpointer: Checkpointer | None = None
        self.clock = StepClock(self.model if job.collectives.world.world_size > 1 else None)
        self.first_step = 0
        """Where this process began: earlier steps are other attempts'."""
        self.own_seconds = 0.0
        """What this process itself spent on the last step, data included, before it waited for others."""
        self._step_began = time.perf_counter()
        self._loss_weights: dict[int, Tensor] = {}
        # On CUDA reading a value makes the host wait for the device.
        self._read_every = 1 if job.device.type == "cpu" or job.options.on_nan == "skip" else job.options.log_every

    @abstractmethod
    def shares(self) -> range:
        """Which shares of the global batch this process computes."""

    @abstractmethod
    def compute_gradients(self, batch: StepBatch) -> None:
        """Forward, backward, reduction: leaves the mean gradient over the global batch in every `.grad`."""

    def meet_others(self) -> None:
        """Send this step's losses and wishes; called once per step on every rank, before it waits for anybody."""
        self.own_seconds = time.perf_counter() - self._step_began
        self.signals.send(self.job.stop.requested)

    def close(self) -> None:  # noqa: B027
        """Let go of threads and of everything that refers to the process group; nothing by default."""

    def train(self) -> None:
        """Train from `state.step` to the end. Raises Stopped, UserError, or what the model raised."""
        job, self.first_step = self.job, self.state.step
        watch = Watch(self.state, self.batches, job.metrics, job.console, self.options.log_every, self.total_steps)
        self.clock.restart()
        stream = self.batches.starting_at(self.state.step, self.total_steps)
        with contextlib.closing(stream):
            for batch in stream:
                self.clock.lap("data")
                if self.job.profiler is not None:
                    self.job.profiler.before_step(batch.step + 1)
                job.faults.before_step(batch.step + 1, batch.tensors)
                before = self._copy_buffers()
                self.compute_gradients(batch)
                reports = self._read_reports(batch)
                self.clock.lap("exposed_communication")
                if self._may_update(reports, batch):
                    self.update_weights(batch)
                else:
                    self._put_back(before)
                self.clock.lap("optimizer")
                self.state.step += 1
                self._leave_traces(batch)
                watch.step_done(batch, reports)
                job.faults.after_step(self.state.step)
                if self.state.step % self.steps_per_epoch == 0 or self.state.step == self.total_steps:
                    self._end_epoch(batch, watch)
                else:
                    self._mid_epoch(watch)
                self.clock.lap("other")
                if any(report.stop for report in reports) and self.state.step < self.total_steps:
                    self.save(watch, wait=True)
                    raise Stopped(self.job.stop.reason or ASKED_ELSEWHERE, self.state.step)

    def forward(self, module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of one micro-batch, summed over its samples; in mixed precision the loss itself is float32."""
        if self.device.type == "cuda":
            inputs, targets = inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)
        if self.precision is None:
            return self.job.loss(module(inputs), targets)
        with torch.autocast(self.device.type, self.precision):
            outputs = module(inputs)
        return self.job.loss(outputs.float(), targets)

    def loss_weight(self, samples: int, copies: int = 1) -> Tensor:
        """What backward starts from: the weight of one sample in the mean over a global batch of `samples`.

        `copies` undoes a division by the number of ranks.
        """
        if samples not in self._loss_weights:
            self._loss_weights[samples] = torch.tensor(copies / samples, device=self.device)
        weight = self._loss_weights[samples]
        return weight if self.state.scaler is None else self.state.scaler.scale(weight)

    def update_weights(self, batch: StepBatch) -> None:
        """Clip, set the rate, step."""
        state = self.state
        if self.checkpointer is not None:
            self.checkpointer.before_update()
        rate = self.experiment.learning_rate(batch.step, self.steps_per_epoch)
        for group in state.optimizer.param_groups:
            group["lr"] = rate
        if state.scaler is not None:
            state.scaler.unscale_(state.optimizer)
        if self.experiment.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.experiment.clip_norm)
        if state.scaler is not None:
            state.scaler.step(state.optimizer)
            state.scaler.update()
        else:
            state.optimizer.step()

    def evaluate(self) -> dict[str, float]:
        """Loss and, for classification, accuracy over the held-out samples; the same on every rank and layout."""
        if self.job.splits.test is None:
            return {}
        return evaluate(
            self.model,
            self.forward_plain,
            self.job.hits,
            self.job.splits.test,
            self.experiment.evaluation,
            self.job.collectives,
        )

    def forward_plain(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, targets and summed loss of a batch, for evaluation."""
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        if self.precision is None:
            outputs = self.model(inputs)
        else:
            with torch.autocast(self.device.type, self.precision):
                outputs = self.model(inputs).float()
        return outputs, targets, self.job.loss(outputs, targets)

    def save(self, watch: Watch | None = None, best: bool = False, wait: bool = False) -> None:
        """Commit a checkpoint of this step boundary (rank 0); all ranks return together when `wait`."""
        before = time.perf_counter()
        self.clock.lap("other")
        if self.checkpointer is not None:
            self.checkpointer.save(
                self.state.state_dict(),
                step=self.state.step,
                epoch=self.state.step // self.steps_per_epoch,
                metadata={"experiment_sha256": self.experiment.digest(), "layout": self.job.layout.label},
                metric=self.state.best if best else None,
                best=best,
                changing=self.model.buffers(),
            )
            if wait:
                self.checkpointer.wait()
        if wait:
            self.job.collectives.barrier()
        self.clock.lap("checkpoint")
        seconds = time.perf_counter() - before
        if watch is not None:
            watch.pause(seconds)
        self.job.metrics.write("checkpoint", step=self.state.step, seconds=seconds)

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.state.step % every == 0

    def _read_reports(self, batch: StepBatch) -> list[StepReport]:
        self.signals.receive()
        last = batch.step + 1 == self.total_steps or (batch.step + 1) % self.steps_per_epoch == 0
        return self.signals.read() if last or (batch.step + 1) % self._read_every == 0 else []

    def _may_update(self, reports: list[StepReport], batch: StepBatch) -> bool:
        """Whether every loss is finite. Raises UserError (5), naming rank, step and samples, unless told to skip."""
        for age, report in enumerate(reversed(reports)):
            total = sum(report.losses)
            if math.isfinite(total):
                self.state.epoch_loss += total
                self.state.epoch_samples += self.batches.samples_of(batch.step - age)
                continue
            step = batch.step - age
            message = self._name_bad_losses(step, report.losses)
            if self.options.on_nan == "stop":
                raise UserError(
                    f"{message}; stopped before the optimizer step, the last checkpoint is good: look at these "
                    "samples, lower optimizer.lr, or use --on-nan skip",
                    ExitCode.NUMERICS,
                )
            self.job.console.say(f"{message}; step skipped")
            return False
        return True

    def _copy_buffers(self) -> list[Tensor]:
        """Batch-norm statistics, which a forward changes and a skipped step must not; none where no step is skipped."""
        return [buffer.clone() for buffer in self.model.buffers()] if self.options.on_nan == "skip" else []

    @torch.no_grad()
    def _put_back(self, before: list[Tensor]) -> None:
        for buffer, value in zip(self.model.buffers(), before, strict=True):
            buffer.copy_(value)

    def _name_bad_losses(self, step: int, losses: list[float]) -> str:
        parts = [
            part for share in range(self.cut.shares) for part in self.cut.share(share, self.batches.samples_of(step))
        ]
        bad = [part for part in parts if not math.isfinite(losses[part.index])]
        if not bad:
            return f"the loss is not finite at step {step + 1}"
        first = bad[0]
        ids = ", ".join(str(number) for number in self.batches.ids(step, first)[:16])
        owner = self.batches.owner(step, first.index)
        who = "replica" if self.job.layout.kind == "dp" else "rank"
        node = f" (node {owner // self.job.layout.nproc_per_node})" if who == "rank" else ""
        return f"loss is {losses[first.index]} at step {step + 1} on {who} {owner}{node}, sample ids {ids}"

    def _end_epoch(self, batch: StepBatch, watch: Watch) -> None:
        state, before = self.state, time.perf_counter()
        watch.epoch_done(batch)
        if state.epoch_samples:
            state.last_epoch_loss = state.epoch_loss / state.epoch_samples
        state.epoch_loss, state.epoch_samples = 0.0, 0
        self.settle_buffers()
        last = state.step == self.total_steps
        best = False
        if last or (batch.epoch + 1) % self.experiment.evaluation.every_epochs == 0:
            state.evaluation = self.evaluate()
            best = self._is_best()
            watch.evaluated(batch)
            self.clock.restart()
        self._record_digest()
        watch.pause(time.perf_counter() - before)
        if self.options.checkpoint_every is None or self._is_due(self.options.checkpoint_every) or best or last:
            self.save(watch, best=best)

    def _leave_traces(self, batch: StepBatch) -> None:
        self._step_began = time.perf_counter()
        if self.job.profiler is not None:
            self.job.profiler.after_step(self.state.step)
        if self.job.heartbeat is not None:
            self.job.heartbeat.beat(self.state.step, self.own_seconds)
        if self.job.ledger is not None:
            ids = [self.batches.ids(batch.step, part) for part in batch.micro_batches]
            self.job.ledger.write(self.state.step, batch.epoch, ids)
        if self.checkpointer is not None:
            self.checkpointer.check()

    def _mid_epoch(self, watch: Watch) -> None:
        if self._is_due(self.options.digest_every):
            before = time.perf_counter()
            self._record_digest()
            watch.pause(time.perf_counter() - before)
        if self._is_due(self.options.checkpoint_every):
            self.save(watch)

    def _record_digest(self) -> None:
        if self.job.collectives.world.is_first:
            digest = weights_digest(self.model.state_dict())
            self.job.metrics.write("digest", step=self.state.step, weights_sha256=digest)

    def settle_buffers(self) -> None:  # noqa: B027
        """Make buffers equal on all ranks where the reduction does not; a layout that needs it overrides this."""

    def _is_best(self) -> bool:
        accuracy, loss = self.state.evaluation.get("test_accuracy"), self.state.evaluation.get("test_loss")
        if loss is None:
            return False
        score = accuracy if accuracy is not None else -loss
        if self.state.best is not None and score <= self.state.best:
            return False
        self.state.best = score
        return True
