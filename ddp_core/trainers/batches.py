"""The way of a batch from the global order to this process: which samples, cut how, loaded when."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from ddp_core.data.loader import Loader
from ddp_core.sampler import GlobalOrder, Ids
from ddp_core.spec.cut import BatchCut, MicroBatch
from ddp_core.spec.experiment import Experiment


@dataclass
class StepBatch:
    """What one process computes of one step: its micro-batches with their inputs and targets."""

    step: int
    epoch: int
    samples: int
    """Samples of the whole global batch, over all ranks."""
    micro_batches: list[MicroBatch]
    tensors: list[tuple[torch.Tensor, torch.Tensor]]


class Batches:
    """The steps of a run from any step on, for the shares that this process computes.

    `shares` numbers the ranks' or replicas' shares: one for a rank, all of them for the one process of `dp`.
    """

    def __init__(
        self, experiment: Experiment, cut: BatchCut, samples: int, loader: Loader, shares: Sequence[int]
    ) -> None:
        self.cut = cut
        self.samples = samples
        self.order = GlobalOrder(samples, experiment.seed)
        self.loader = loader
        self.shares = shares
        whole, rest = divmod(samples, cut.global_batch_size)
        self.steps_per_epoch = whole + (1 if rest and experiment.last_batch == "keep" else 0)
        self.wait_seconds = 0.0
        self._mine: dict[int, list[MicroBatch]] = {}

    def samples_of(self, step: int) -> int:
        """Samples of a step's global batch: fewer in an incomplete last one."""
        start = step % self.steps_per_epoch * self.cut.global_batch_size
        return min(self.cut.global_batch_size, self.samples - start)

    def ids(self, step: int, micro_batch: MicroBatch) -> Ids:
        """The sample ids of one micro-batch: a pure function of seed, step and the micro-batch."""
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.cut.global_batch_size
        return self.order.ids(epoch, start + micro_batch.start, start + micro_batch.stop)

    def mine(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step that this process computes, in canonical order."""
        samples = self.samples_of(step)
        if samples not in self._mine:
            self._mine[samples] = [part for share in self.shares for part in self.cut.share(share, samples)]
        return self._mine[samples]

    def owner(self, step: int, micro_batch: int) -> int:
        """The share that a micro-batch belongs to."""
        samples = self.samples_of(step)
        for share in range(self.cut.shares):
            if any(part.index == micro_batch for part in self.cut.share(share, samples)):
                return share
        raise IndexError(micro_batch)

    def starting_at(self, first_step: int, stop_step: int) -> Generator[StepBatch]:
        """The steps [first_step, stop_step); time spent waiting for data adds up in `wait_seconds`."""
        steps = range(first_step, stop_step)
        stream = self.loader.stream(
            (step // self.steps_per_epoch, [self.ids(step, part) for part in self.mine(step)]) for step in steps
        )
        for step in steps:
            before = time.perf_counter()
            tensors = next(stream)
            self.wait_seconds += time.perf_counter() - before
            yield StepBatch(step, step // self.steps_per_epoch, self.samples_of(step), self.mine(step), tensors)
