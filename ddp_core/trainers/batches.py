"""Which samples this process computes in each step, cut into micro-batches and loaded."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ddp_core.base.errors import UserError
from ddp_core.base.seeds import micro_batch_words
from ddp_core.base.trees import Batch, Key, StepIds
from ddp_core.config.cut import BatchCut, MicroBatch
from ddp_core.config.experiment import Experiment
from ddp_core.data.loader import Loader
from ddp_core.data.splits import Weights
from ddp_core.observe.step import StepBatch
from ddp_core.sampler import GlobalOrder, Ids


class Batches:
    """The batches of a run, from any step on, cut to the shares of the global batch that this process computes.

    `shares` holds the numbers of these shares: one for a rank of `ddp`, one for each replica in the one process of
    `dp`. `samples` is the number of training samples, `weights` what each of them weighs in the loss (None: 1).
    """

    def __init__(
        self,
        experiment: Experiment,
        cut: BatchCut,
        samples: int,
        loader: Loader,
        shares: Sequence[int],
        weights: Weights | None = None,
    ) -> None:
        self.cut = self._before = cut
        self._since = 0
        """From this step on micro-batches are dealt by `cut`; losses of steps before may be read later."""
        self.samples = samples
        self.order = GlobalOrder(samples, experiment.seed)
        self._seed = experiment.seed
        self.loader = loader
        self.shares = shares
        self._weights = None if weights is None else np.asarray(weights)
        self.steps_per_epoch = experiment.steps_per_epoch(samples)
        self._mine: dict[int, list[MicroBatch]] = {}

    def deal(self, dealt: tuple[int, ...], step: int) -> None:
        """From this step on, let each rank compute so many parts of a step."""
        self._before, self._since = self.cut, step
        self.cut, self._mine = replace(self.cut, dealt=dealt), {}

    def samples_of(self, step: int) -> int:
        """The number of samples in a step's global batch; an incomplete last batch has fewer."""
        start = step % self.steps_per_epoch * self.cut.global_batch_size
        return min(self.cut.global_batch_size, self.samples - start)

    def divisor_of(self, step: int) -> int:
        """The number of samples in a step's global batch, or what they weigh together.

        Raises UserError where they weigh nothing.
        """
        if self._weights is None:
            return self.samples_of(step)
        if not (weight := int(self._weights[self._ids(step, 0, self.samples_of(step))].sum())):
            raise UserError(f"step {step + 1}: the samples of this global batch weigh nothing: see weights of Splits")
        return weight

    def ids(self, step: int, micro_batch: MicroBatch) -> Ids:
        """The sample ids of one micro-batch: a pure function of seed, step and the micro-batch."""
        return self._ids(step, micro_batch.start, micro_batch.stop)

    def _ids(self, step: int, start: int, stop: int) -> Ids:
        epoch, position = divmod(step, self.steps_per_epoch)
        first = position * self.cut.global_batch_size
        return self.order.ids(epoch, first + start, first + stop)

    def key(self, step: int, micro_batch: MicroBatch) -> Key:
        """What the random numbers follow from that are drawn while the micro-batch is made."""
        return micro_batch_words(self._seed, step, micro_batch.index)

    def mine(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step that this process computes, in the order of their numbers."""
        samples = self.samples_of(step)
        if samples not in self._mine:
            self._mine[samples] = [part for share in self.shares for part in self.cut.share(share, samples)]
        return self._mine[samples]

    def fetch(self, batch: StepBatch, micro_batch: MicroBatch) -> Batch:
        """Inputs and targets of a micro-batch of the step that another process computes."""
        ids, key = self.ids(batch.step, micro_batch), self.key(batch.step, micro_batch)
        return self.loader.fetch(batch.epoch, ids, key)

    def owner(self, step: int, micro_batch: int) -> int:
        """The number of the share that a micro-batch of the step belongs to."""
        samples = self.samples_of(step)
        cut = self.cut if step >= self._since else self._before
        shares = (cut.share(share, samples) for share in range(cut.shares))
        return next(share for share, parts in enumerate(shares) if any(part.index == micro_batch for part in parts))

    def done(self, step: int) -> StepBatch:
        """The batch of a step that was trained before, without its micro-batches."""
        return StepBatch(step, step // self.steps_per_epoch, self.samples_of(step), self.divisor_of(step), [], [], [])

    def starting_at(self, first_step: int, stop_step: int) -> Generator[StepBatch]:
        """The batches of the steps from `first_step` to before `stop_step`."""
        while first_step < stop_step:
            first_step = yield from self._in_one_cut(first_step, stop_step)

    def _in_one_cut(self, first_step: int, stop_step: int) -> Generator[StepBatch, None, int]:
        """These batches, until micro-batches are dealt otherwise; returns the step that is next."""
        # The loader prepares later steps in advance, so the ids of those steps wait here for their tensors.
        waiting, cut = deque[list[Ids]](), self.cut

        def ids_of_steps() -> Iterator[StepIds]:
            for step in range(first_step, stop_step):
                mine = self.mine(step)
                waiting.append([self.ids(step, part) for part in mine])
                keys = [self.key(step, part) for part in mine]
                yield step // self.steps_per_epoch, waiting[-1], keys

        with contextlib.closing(self.loader.stream(ids_of_steps())) as stream:
            for step in range(first_step, stop_step):
                before = time.perf_counter()
                tensors = next(stream)
                seconds = time.perf_counter() - before
                own = self.mine(step), waiting.popleft(), tensors, seconds
                yield StepBatch(step, step // self.steps_per_epoch, self.samples_of(step), self.divisor_of(step), *own)
                if self.cut is not cut:
                    return step + 1
        return stop_step
