"""What layouts do differently: how a step's gradients are computed, and what follows from that; and one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ddp_core.base.seeds import MicroBatchSeed, generators_kept
from ddp_core.model.forward_state import ForwardState
from ddp_core.observe.step import StepBatch
from ddp_core.reduction import ExactReduction, clip_gradients_, gradient_norm
from ddp_core.reduction.plain import PlainReduction
from ddp_core.trainers.batches import Batches
from ddp_core.trainers.clock import StepClock
from ddp_core.trainers.job import Job
from ddp_core.trainers.passes import Passes
from ddp_core.trainers.step_losses import StepLosses
from ddp_core.trainers.train_state import TrainState


@dataclass(eq=False)
class Strategy(ABC):
    """Computes the gradients of a step on one kind of layout, over the model of `state`."""

    job: Job
    state: TrainState
    batches: Batches
    passes: Passes
    losses: StepLosses
    clock: StepClock
    compares_after: Callable[[int], bool]
    """Whether the ranks of a run compare their weights after so many steps; replicas then do, too."""

    def __post_init__(self) -> None:
        self.seeds = MicroBatchSeed(self.job.experiment.seed, self.job.device)
        self.model.train()
        self.set_up()

    @property
    def model(self) -> nn.Module:
        """The model itself, without what wraps it."""
        return self.state.model

    @property
    def where(self) -> str:
        """Which step this is, and which process, in words."""
        return f"step {self.state.step + 1}, {self.job.collectives.world.place}"

    @abstractmethod
    def set_up(self) -> None:
        """Make what computes and adds up gradients; made anew by some layouts where other parameters train."""

    @abstractmethod
    def compute_gradients(self, batch: StepBatch) -> None:
        """Forward, backward, reduction: leaves the mean gradient over the global batch in every `.grad`.

        It puts the loss of each micro-batch that it computes into `losses`, and calls `send_losses` once.
        """

    def send_losses(self, batch: StepBatch) -> None:
        """Send the step's losses, and whether this process was asked to leave.

        Called once per step on every rank, after its last forward.
        """
        self.losses.send(batch, self.job.stop.requested or self.job.collectives.makes_room)

    def write_along(self, batch: StepBatch) -> None:
        """Run the forward of micro-batch 0 in a step that has no micro-batch for this model: it may write to weights.

        One that clamps them would else leave other weights here than elsewhere. Nothing else is left of it.
        """
        if not self.job.is_exact or not self.state.ownership.has_whole_weights or self.job.options.cuda_graph:
            return
        part = self.batches.cut.parts(batch.samples)[0]
        before = ForwardState(self.model)
        with generators_kept(self.job.device):
            self.seeds(batch.step, part.index)
            self.passes.loss(self.model, *self.batches.fetch(batch, part))
        before.put_back()

    def clip_gradients(self, max_norm: float) -> None:
        """Limit the norm of the gradient; overridden where a rank has a part of it."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if self.job.is_exact:
            clip_gradients_(parameters, gradient_norm(parameters), max_norm)
        else:
            nn.utils.clip_grad_norm_(parameters, max_norm)

    def refuse_to_retrain(self, changes: dict[str, bool]) -> None:  # noqa: B027
        """Raise UserError where what is trained cannot change; overridden where parameters are cut."""

    def retrain(self) -> None:  # noqa: B027
        """Make anew what depends on which parameters are trained; overridden where something does."""

    def settle_buffers(self) -> None:  # noqa: B027
        """Make the buffers equal on all ranks; overridden where the reduction does not do so."""

    def close(self) -> None:  # noqa: B027
        """End threads and drop everything that refers to the process group; does nothing by default."""


class SingleStrategy(Strategy):
    """Computes all micro-batches, one after the other, on one device: what every other layout is compared with."""

    reduction: ExactReduction | PlainReduction
    """Adds up the gradients of the micro-batches."""
    module: nn.Module
    """The model, or what wraps it."""
    sends_in_backward = False
    """Whether the last backward of a step sends gradients to other ranks, so that losses are sent beside it."""
    loss_copies = 1
    """By how much the reduction divides its sums, so that the loss is weighted with it."""

    def set_up(self) -> None:
        kind = ExactReduction if self.job.is_exact else PlainReduction
        self.module = self.model
        self.reduction = kind(self.module, self.batches.cut.micro_batches)

    def compute_gradients(self, batch: StepBatch) -> None:
        """Forward and backward of this process's micro-batches; the last backward may send gradients, too."""
        if not batch.micro_batches:
            self.write_along(batch)
        self.reduction.begin(self.batches.cut.count(batch.samples))
        weight = self.passes.loss_weight(batch.divisor, self.loss_copies)
        for part, (inputs, targets) in zip(batch.micro_batches, batch.tensors, strict=True):
            self.seeds(batch.step, part.index)
            with self.reduction.micro_batch(part.index, part.stop - part.start):
                loss = self.passes.loss(self.module, inputs, targets)
                self.losses.put(part.index, loss.detach())
                self.clock.lap("forward")
                if self.batches.cut.is_strided:
                    self.losses.tell_wait()  # each backward exchanges gradients, not only the last
                if part is batch.micro_batches[-1] and self.sends_in_backward:
                    self.send_losses(batch)
                self.passes.backward(loss, weight)
                self.clock.lap_backward()
            if self.batches.cut.is_strided:
                # What backward has not sent yet is sent at the end of the block.
                self.clock.lap("exposed_communication")
        if not batch.micro_batches:
            self.join_empty_handed(batch)
        elif not self.sends_in_backward:
            self.send_losses(batch)
        self.join_last_round(batch)
        self.reduction.finish()

    def join_last_round(self, batch: StepBatch) -> None:
        """Take part in what other ranks still do for the step; overridden where all ranks must."""

    def join_empty_handed(self, batch: StepBatch) -> None:
        """Take part in a step without a micro-batch: an incomplete last batch may leave none for this rank."""
        self.send_losses(batch)

    def retrain(self) -> None:
        self.close()
        self.passes.forget()
        self.set_up()

    def close(self) -> None:
        """Give the batch-norm layers their momenta back."""
        self.reduction.close()
