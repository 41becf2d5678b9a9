"""One process, one device: the reference that every other layout is compared with."""

from __future__ import annotations

from ddp_core.observe.step import StepBatch
from ddp_core.reduction import ExactReduction
from ddp_core.reduction.plain import PlainReduction
from ddp_core.trainers.job import Job
from ddp_core.trainers.trainer import Trainer


class SingleTrainer(Trainer):
    """Computes all micro-batches, one after the other, on one device."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.set_up()
        self.model.train()

    def set_up(self) -> None:
        """Make what adds up the gradients."""
        kind = ExactReduction if self.exact else PlainReduction
        self.reduction = kind(self.model, self.cut.micro_batches)

    def compute_gradients(self, batch: StepBatch) -> None:
        """Forward and backward of each micro-batch; the reduction adds up the gradients."""
        self.reduction.begin(self.cut.count(batch.samples))
        weight = self.passes.loss_weight(batch.samples)
        for part, (inputs, targets) in zip(batch.micro_batches, batch.tensors, strict=True):
            with self.micro_batch(batch, part):
                loss = self.passes.loss(self.model, inputs, targets)
                self.losses.put(part.index, loss.detach())
                self.clock.lap("forward")
                self.passes.backward(loss, weight)
                self.clock.lap_backward()
        self.send_losses(batch)
        self.reduction.finish()

    def retrain(self) -> None:
        """Add up the gradients of what is trained now."""
        self.reduction.close()
        self.set_up()

    def close(self) -> None:
        """Give the batch-norm layers their momenta back."""
        self.reduction.close()
