"""One process, several replicas: nn.DataParallel on CUDA, and its five moves over threads on CPU.

In every step nn.DataParallel scatters the batch, replicates the module, applies the replicas in parallel threads,
gathers the outputs, and in backward reduces the gradients onto the first device. On CPU, torch's class only calls the
module. Here the same moves are made over copies of the module, so that the layouts can be compared on a laptop. Two
things differ: each thread runs its own backward (torch's CPU autograd would run them one after the other), and losses
are gathered instead of outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor, nn

from ddp_core.data.collating import Batch
from ddp_core.data.trees import map_tensors, tensors_of
from ddp_core.errors import UserError
from ddp_core.observe.step import StepBatch
from ddp_core.reduction import BatchStatistics, GradientTree, fold_replicas, take_gradients
from ddp_core.shares import share_of
from ddp_core.trainers.job import Job
from ddp_core.trainers.keyed_random import KeyedRandom
from ddp_core.trainers.trainer import Trainer

Gradients = list[Tensor | None]


class DataParallelTrainer(Trainer):
    """`dp` on CPU: each replica of the model runs in a thread of its own."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        count = job.layout.nproc_per_node
        self.model.train()
        self.replicas = [_Replica(self, number) for number in range(count)]
        threads = torch.get_num_threads()
        # OpenMP keeps a number of threads for each Python thread, so every new thread must set its own.
        self.threads = ThreadPoolExecutor(count, "replica", initializer=lambda: torch.set_num_threads(threads))

    def shares(self) -> range:
        """All shares: this one process computes for every replica."""
        return range(self.job.layout.nproc_per_node)

    def compute_gradients(self, batch: StepBatch) -> None:
        """Scatter, replicate, parallel apply, gather, reduce."""
        self.signals.begin(batch)
        scattered = self._scatter(batch)
        for replica in self.replicas[1:]:
            replica.copy_from(self.model)
        self.clock.lap("exposed_communication")
        applied = [
            self.threads.submit(replica.apply, share) for replica, share in zip(self.replicas, scattered, strict=True)
        ]
        found = [future.result() for future in applied]
        self.clock.lap("forward_backward")
        for losses in found:
            for index, loss in losses:
                self.signals.put_loss(index, loss)
        self.send_signals()
        self._reduce()

    def close(self) -> None:
        """End the threads."""
        self.threads.shutdown()

    def _scatter(self, batch: StepBatch) -> list[StepBatch]:
        """Each replica's part of the batch: the first share has the first micro-batches, and so on."""
        parts, stop = [], 0
        for share in self.shares():
            start, stop = stop, stop + len(self.cut.share(share, batch.samples))
            own = slice(start, stop)
            parts.append(
                replace(batch, micro_batches=batch.micro_batches[own], ids=batch.ids[own], tensors=batch.tensors[own])
            )
        return parts

    def _reduce(self) -> None:
        """Sum all gradients into the first replica's: in the canonical tree, or from left to right as torch does."""
        parameters = self.replicas[0].parameters
        if self.exact:
            gradients = fold_replicas([replica.tree for replica in self.replicas])
            self.replicas[0].statistics.finish(self._statistics_total())
            for replica in self.replicas[1:]:
                replica.statistics.restore()
        else:
            gradients = list(self.replicas[0].gradients)
            for replica in self.replicas[1:]:
                for number, gradient in enumerate(replica.gradients):
                    ours = gradients[number]
                    gradients[number] = gradient if ours is None else ours if gradient is None else ours.add_(gradient)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    def _statistics_total(self) -> Tensor:
        total = fold_replicas([replica.statistics_tree for replica in self.replicas])[0]
        assert total is not None
        return total


class _Replica:
    """A replica of the model, and what it has computed in one step."""

    def __init__(self, trainer: DataParallelTrainer, number: int) -> None:
        self.trainer = trainer
        self.number = number
        self.module = trainer.model if number == 0 else copy.deepcopy(trainer.model)
        self.parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.statistics = BatchStatistics(self.module)
        self.random = KeyedRandom(trainer.experiment.seed)
        self.tree = self.statistics_tree = GradientTree(1)
        self.gradients: Gradients = []

    @torch.no_grad()
    def copy_from(self, model: nn.Module) -> None:
        """Copy the first replica's parameters and buffers, as nn.DataParallel does before every forward."""
        for ours, theirs in ((self.module.parameters(), model.parameters()), (self.module.buffers(), model.buffers())):
            for mine, other in zip(ours, theirs, strict=True):
                mine.copy_(other)

    def apply(self, share: StepBatch) -> list[tuple[int, Tensor]]:
        """Forward and backward of this replica's micro-batches; returns their losses."""
        trainer = self.trainer
        count = trainer.cut.count(share.samples)
        own = share_of(count, self.number, trainer.cut.shares)
        self.tree, self.statistics_tree = (GradientTree(count, own.start, own.stop) for _ in range(2))
        take_gradients(self.parameters)
        if trainer.exact:
            self.statistics.begin()
        weight, losses = trainer.passes.loss_weight(share.samples), []
        for part, (inputs, targets) in zip(share.micro_batches, share.tensors, strict=True):
            with self.random.micro_batch(share.step, part.index):
                loss = trainer.passes.loss(self.module, inputs, targets)
            losses.append((part.index, loss.detach()))
            trainer.passes.backward(loss, weight)
            if trainer.exact:
                self.tree.push(take_gradients(self.parameters))
                self.statistics_tree.push([self.statistics.take(part.stop - part.start)])
        self.gradients = [] if trainer.exact else take_gradients(self.parameters)
        return losses


class CudaDataParallelTrainer(Trainer):
    """nn.DataParallel itself, over CUDA devices: each round takes one micro-batch per device.

    nn.DataParallel sums the replicas' gradients inside autograd, where the order of the additions cannot be chosen. So
    this trainer has no exact reduction.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.module = nn.DataParallel(self.model, device_ids=list(range(job.layout.nproc_per_node)))
        self.module.train()

    def shares(self) -> range:
        """All shares: this one process feeds every device."""
        return range(self.job.layout.nproc_per_node)

    def compute_gradients(self, batch: StepBatch) -> None:
        """Call nn.DataParallel once per round; it scatters, replicates, applies, gathers and reduces."""
        self.signals.begin(batch)
        for parameter in self.model.parameters():
            parameter.grad = None
        weight = self.passes.loss_weight(batch.samples)
        for members in _rounds(batch, self.cut.shares, self.cut.count(batch.samples)):
            self.seed_micro_batch(batch.step, batch.micro_batches[members[0]].index)
            parts = [batch.micro_batches[member] for member in members]
            inputs, targets = _joined(
                [batch.tensors[member] for member in members], [part.stop - part.start for part in parts]
            )
            loss = self.passes.loss(self.module, inputs, targets)
            self.signals.put_loss(batch.micro_batches[members[0]].index, loss.detach())
            self.passes.backward(loss, weight)
        self.send_signals()


def _joined(batches: Sequence[Batch], samples: Sequence[int]) -> Batch:
    """The micro-batches of a round as one batch, which nn.DataParallel cuts again along the first dimension.

    Raises UserError where that cut would be another one, or where shapes differ.
    """
    for batch, count in zip(batches, samples, strict=True):
        sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors_of(batch)} - {count}
        if sizes:
            raise UserError(
                f"nn.DataParallel cuts every tensor along its first dimension, but a micro-batch of {count} samples "
                f"has a tensor with {min(sizes)} there; let it have one row per sample, or use --layout ddp"
            )
    try:
        inputs, targets = map_tensors(lambda *parts: torch.cat(parts), *batches)
    except RuntimeError as error:
        raise UserError(
            "nn.DataParallel takes the micro-batches of all devices as one batch, and these have different shapes "
            f"({error}); let collate pad to a fixed length, or use --layout ddp"
        ) from None
    return inputs, targets


def _rounds(batch: StepBatch, shares: int, count: int) -> list[Sequence[int]]:
    """The rounds, as positions in the batch: round n has the n-th micro-batch of every share."""
    positions = {part.index: number for number, part in enumerate(batch.micro_batches)}
    owned = [share_of(count, share, shares) for share in range(shares)]
    longest = max(len(share) for share in owned)
    return [[positions[share[turn]] for share in owned if turn < len(share)] for turn in range(longest)]
