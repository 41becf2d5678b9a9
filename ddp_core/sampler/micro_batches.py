"""Steps for the exact reduction: the global order, cut into micro-batches, and this rank's share of them, loaded.

A step takes the next M * m positions of the epoch's global order, of which micro-batch j holds [j * m, (j + 1) * m).
The reduction decides which rank computes which micro-batch (`share_of`), so contiguous and strided shares read the same
micro-batches. An ElasticSampler gives the order and counts the position; the positions that its own iterator would give
to each rank are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, cast

import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from typing_extensions import TypeVar

from ddp_core.base.seeds import mix

from .elastic import ElasticSampler

Batch = TypeVar("Batch", default=Any)
"""What a micro-batch is loaded as: what `collate_fn` returns, or else tensors."""


class StepReduction(Protocol):
    """What a step needs of an ExactReduction."""

    micro_batches: int

    def share_of(self, micro_batches: int) -> range:
        """The indices of the micro-batches that this rank computes, in a step of `micro_batches` of all ranks."""

    def begin(self, micro_batches: int) -> None:
        """Start a step of `micro_batches` of all ranks together."""


@dataclass
class Step(Generic[Batch]):
    """One update's micro-batches: iterating begins the step and yields `(index, batch)` for those of this rank.

    When all have been run, the sampler counts the step as trained: save its state after the optimizer's step.
    """

    samples: int
    """Samples of all ranks together; the scale of a sum of losses is 1 / samples."""
    micro_batches: int
    """Micro-batches of all ranks together; fewer in an incomplete last step."""
    epoch: int
    first: int
    """The position of the first sample in the epoch's global order."""
    _source: MicroBatches[Batch] = field(repr=False)
    _fetched: Iterator[Batch] = field(repr=False)
    _passes: int = field(default=0, repr=False)

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        sampler, reduction = self._source.sampler, self._source.reduction
        if (sampler.epoch, sampler.samples_trained) != (self.epoch, self.first):
            raise RuntimeError(
                f"the step at position {self.first} of epoch {self.epoch} is out of turn: the sampler stands at "
                f"{sampler.samples_trained} of epoch {sampler.epoch}; run every step once, to its end"
            )
        reduction.begin(self.micro_batches)
        for index in reduction.share_of(self.micro_batches):
            batch = next(self._fetched)
            self._seed(index)
            yield index, batch
        sampler.advance(self.samples)

    def again(self, parts: Iterable[tuple[int, Batch]]) -> Iterator[tuple[int, Batch]]:
        """Begin the reduction anew, for another update on the same micro-batches (a generator's after its critic's).

        `parts` are the `(index, batch)` that the loop kept of the first pass. The random numbers are others than in the
        passes before, and as little dependent on the layout.
        """
        self._passes += 1
        self._source.reduction.begin(self.micro_batches)
        for index, batch in parts:
            self._seed(index, self._passes)
            yield index, batch

    def _seed(self, index: int, *again: int) -> None:
        if self._source.keyed_random:
            torch.manual_seed(mix(self._source.sampler.seed, self.epoch, self.first, index, 3, *again) >> 1)


class MicroBatches(Generic[Batch]):
    """Yields the steps of an epoch, from the sampler's position on; each yields this rank's micro-batches, loaded.

        batches = MicroBatches(dataset, sampler, exact, micro_batch=32)
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for step in batches:
                for index, (x, y) in step:
                    with exact.micro_batch(index):
                        loss_sum(module(x), y).backward()
                exact.finish(scale=1 / step.samples)
                optimizer.step()

    A step has `reduction.micro_batches` micro-batches of `micro_batch` samples. What is left at the end of an epoch is
    a step of fewer micro-batches, the last one perhaps shorter, or is dropped if the sampler's `drop_last` says so. To
    resume, on any number of ranks, load the sampler's state.

    Before each micro-batch torch's generators are seeded from (the sampler's seed, epoch, position, index), so that
    dropout does not depend on the layout; not with `keyed_random=False`. Random augmentation in the data set is not
    covered: key that by the sample's index. `collate_fn`, and `loader`, such as `num_workers`, are keywords of torch's
    DataLoader; what a data set's `__getitems__` returns as a tuple is a batch already, and needs no `collate_fn`.

    Raises ValueError where data set and sampler are of different lengths, or lasting loader processes would not hear of
    a data set's `set_epoch`; RuntimeError for a step out of turn and for a second pass over one epoch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: ElasticSampler,
        reduction: StepReduction,
        micro_batch: int,
        *,
        keyed_random: bool = True,
        collate_fn: Callable[[Any], Batch] | None = None,
        **loader: Any,
    ) -> None:
        if micro_batch < 1:
            raise ValueError(f"a micro-batch has at least one sample, not {micro_batch}")
        if (samples := len(cast(Sized, dataset))) != len(sampler.order):
            raise ValueError(f"the data set has {samples} samples, the sampler's order {len(sampler.order)}")
        if loader.get("persistent_workers") and hasattr(dataset, "set_epoch"):
            raise ValueError(
                "with persistent_workers, loader processes keep a copy of the data set that never hears of its "
                "set_epoch: leave persistent_workers out"
            )
        self.sampler, self.reduction, self.micro_batch = sampler, reduction, micro_batch
        self.keyed_random = keyed_random
        # Without a generator of its own, a DataLoader draws from the global one whenever it is iterated.
        loader.setdefault("generator", torch.Generator())
        self._loader = DataLoader(dataset, batch_sampler=_Ids(self), collate_fn=collate_fn or _collated, **loader)
        self._passed: int | None = None

    def __len__(self) -> int:
        """The number of steps of a whole epoch, the same wherever the sampler stands."""
        size = self.reduction.micro_batches * self.micro_batch
        return -(-self.sampler.samples_trained // size) + self.remaining

    @property
    def remaining(self) -> int:
        """The number of steps from the sampler's position to the end of its epoch."""
        return len(self._firsts())

    def __iter__(self) -> Iterator[Step[Batch]]:
        firsts, epoch = self._firsts(), self.sampler.epoch
        if not firsts and self._passed == epoch:
            raise RuntimeError(f"epoch {epoch} has been trained: call sampler.set_epoch({epoch + 1}) for the next one")
        return self._steps(epoch, firsts, iter(self._loader))

    def _steps(self, epoch: int, firsts: range, fetched: Iterator[Batch]) -> Iterator[Step[Batch]]:
        for first in firsts:
            samples = self._samples(first)
            yield Step(samples, -(-samples // self.micro_batch), epoch, first, self, fetched)
        next(fetched, None)  # At its end, and not before, a loader ends its processes.
        self._passed = epoch

    def _firsts(self) -> range:
        """The positions at which the remaining steps of the sampler's epoch begin."""
        start, length = self.sampler.samples_trained, len(self.sampler.order)
        size = self.reduction.micro_batches * self.micro_batch
        whole = (length - start) // size * size
        return range(start, start + whole if self.sampler.drop_last else length, size)

    def _samples(self, first: int) -> int:
        """How many samples the step at position `first` has, of all ranks together."""
        return min(self.reduction.micro_batches * self.micro_batch, len(self.sampler.order) - first)

    def _ids(self, epoch: int, firsts: range) -> Iterator[list[int]]:
        """The sample ids of each micro-batch that this rank computes in the steps that begin at `firsts`."""
        for first in firsts:
            stop = first + self._samples(first)
            for index in self.reduction.share_of(-(-(stop - first) // self.micro_batch)):
                begin = first + index * self.micro_batch
                yield self.sampler.order.ids(epoch, begin, min(begin + self.micro_batch, stop)).tolist()


def _collated(fetched: Any) -> Any:
    """The batch of what a data set gave: samples come as a list, so that a tuple is a batch from `__getitems__`."""
    return fetched if isinstance(fetched, tuple) else default_collate(fetched)


class _Ids:
    """A batch sampler for torch's DataLoader: the ids of this rank's micro-batches, from where the sampler stands now.

    The loader asks for the ids of later steps in advance, so they are counted from the position where the pass began.
    """

    def __init__(self, batches: MicroBatches[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches._ids(self._batches.sampler.epoch, self._batches._firsts())
