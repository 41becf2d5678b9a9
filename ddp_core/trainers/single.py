"""One process, one device: the reference that every other layout is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ddp_core.config.cut import MicroBatch
from ddp_core.observe.step import StepBatch
from ddp_core.reduction import ExactReduction
from ddp_core.reduction.plain import PlainReduction
from ddp_core.trainers.strategy import Strategy


class SingleStrategy(Strategy):
    """Computes all micro-batches, one after the other, on one device."""

    reduction: ExactReduction | PlainReduction
    """Adds up the gradients of the micro-batches."""

    def set_up(self) -> None:
        kind = ExactReduction if self.job.is_exact else PlainReduction
        self.reduction = kind(self.model, self.batches.cut.micro_batches)

    @contextlib.contextmanager
    def micro_batch(self, batch: StepBatch, part: MicroBatch) -> Iterator[None]:
        """Run forward and backward of one micro-batch inside: seeded, and reduced."""
        self.seeds(batch.step, part.index)
        with self.reduction.micro_batch(part.index, part.stop - part.start):
            yield

    def compute_gradients(self, batch: StepBatch) -> None:
        self.reduction.begin(self.batches.cut.count(batch.samples))
        weight = self.passes.loss_weight(batch.divisor)
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
        self.reduction.close()
        self.passes.forget()
        self.set_up()

    def close(self) -> None:
        """Give the batch-norm layers their momenta back."""
        self.reduction.close()
