"""How the samples of an epoch are dealt to ranks in loops that give rank r the micro-batches r, r + W, r + 2W, …

What is drawn for a micro-batch follows from it. A torch DataLoader asks its batch sampler for ids, and its data set for
the samples, here or in a worker process. With `keyed` the ids carry the number of their micro-batch, and before they
are read all generators are seeded by (seed, epoch, number), which no number of ranks or workers changes: so a collator
that masks at random, or noise in a data set, is the same on every layout. What does not follow from these generators is
found by reading a micro-batch twice.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from ddp_core.base.digests import tree_digest
from ddp_core.base.errors import UserError
from ddp_core.base.seeds import MicroBatchSeed, dealt_words
from ddp_core.base.trees import as_it_is
from ddp_core.base.user_code import user_code
from ddp_core.sampler import BLOCK, GlobalOrder

__all__ = ["DealtBatches", "WholeSteps", "accumulation_steps", "deal"]


_KEPT = (
    *("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)
"""What a loader that reads anew takes over from the loader it stands for."""
_NAMED = 4
"""How many sample ids a message names."""


class MicroBatchIds(list[int]):
    """The ids of a micro-batch's samples, with the epoch, and the number that it has in this epoch on one rank."""

    epoch = 0
    number = 0
    is_trained = True
    """Whether weights will depend on it: not in an evaluation."""


class KeyedBatches(BatchSampler):
    """Torch's BatchSampler, whose batches know which they are. A sampler without `epoch` is always in epoch 0."""

    is_training: Callable[[], bool] = staticmethod(lambda: True)
    """Asked when an iteration begins: whether it is for training, and not for an evaluation."""

    def __iter__(self) -> Iterator[list[int]]:
        epoch, is_trained = getattr(self.sampler, "epoch", 0), self.is_training()
        for number, ids in enumerate(super().__iter__()):
            known = MicroBatchIds(ids)
            known.epoch, known.number, known.is_trained = epoch, number, is_trained
            yield known


def keyed(
    loader: DataLoader[Any], batches: KeyedBatches, seed: int, is_training: Callable[[], bool] | None = None
) -> DataLoader[Any]:
    """A copy of the loader, with `batches` as its batch sampler, whose random numbers follow from the micro-batch.

    `is_training` is theirs (None: always). A loader that this has returned is left as it is.
    """
    if isinstance(loader.dataset, _KeyedReading):
        return loader
    if is_training is not None:
        batches.is_training = is_training
    dataset = _KeyedReading(loader.dataset, loader.collate_fn, seed)
    kept = {name: getattr(loader, name) for name in _KEPT}
    return DataLoader(dataset, batch_sampler=batches, collate_fn=as_it_is, **kept)


def keyed_in_place(loader: Any, seed: int, is_training: Callable[[], bool] | None = None) -> Any:
    """`keyed` with the loader's own sampler; the loader itself where it is not torch's own with torch's own batches."""
    if type(loader) is not DataLoader or type(loader.batch_sampler) is not BatchSampler:
        return loader
    own = loader.batch_sampler
    is_in_sequence = type(own.sampler) is SequentialSampler  # which does not know the epoch
    sampler = WholeSteps(loader.dataset, 1, seed, shuffle=False) if is_in_sequence else own.sampler  # type: ignore[arg-type]
    return keyed(loader, KeyedBatches(sampler, own.batch_size, own.drop_last), seed, is_training)


class _KeyedReading(Dataset[Any]):
    """The user's data set, which makes whole micro-batches, collated, from MicroBatchIds.

    Micro-batches 0, 1, 3, 7 … of an epoch are made twice. Raises UserError where the second is not the first; of an
    evaluation, on which no weight depends, it warns once.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while a worker process unpickles this
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, ids: MicroBatchIds) -> Any:
        batch = self._made(ids)
        if ids.number & ids.number + 1 == 0 and (ids.is_trained or not self._has_warned):
            digest = tree_digest(batch)
            if tree_digest(self._made(ids)) != digest:
                self._say_another(ids)
        return batch

    def _say_another(self, ids: MicroBatchIds) -> None:
        named = ", ".join(map(str, ids[:_NAMED])) + (", …" if len(ids) > _NAMED else "")
        which = f"micro-batch {ids.number} of epoch {ids.epoch} (samples {named})"
        what = f"{which} is another one when it is read a second time"
        why = (
            f"{type(self._dataset).__name__} or its collate function has a random generator of its own, draws true "
            "random numbers, or counts its calls; let it draw from torch, numpy.random or random as they are, which "
            "are seeded before each micro-batch"
        )
        if ids.is_trained:
            raise UserError(f"{what}, so another number of ranks would train on other data: {why}")
        self._has_warned = True
        warnings.warn(
            f"in an evaluation, {what}. The model is in evaluation mode or makes no gradients, so no weights depend on "
            f"it, but the figures of the evaluation are others each time: {why}",
            stacklevel=2,
        )

    def _made(self, ids: MicroBatchIds) -> Any:
        words = dealt_words(self._seed, ids.epoch, ids.number)
        MicroBatchSeed(self._seed, torch.device("cpu"), at_once=True).begin(*words)
        several = getattr(self._dataset, "__getitems__", None)
        with user_code("your data set"):
            samples = [self._dataset[number] for number in ids] if several is None else several(list(ids))
            return self._collate(samples)


def accumulation_steps(micro_batches: int, world_size: int) -> int:
    """The micro-batches of each rank in a step. Raises UserError where the ranks' numbers would differ."""
    if micro_batches < 1 or micro_batches % world_size:
        possible = [str(ranks) for ranks in range(1, micro_batches + 1) if micro_batches % ranks == 0]
        raise UserError(
            f"{micro_batches} micro-batches per step cannot be dealt evenly to {world_size} ranks, and in this loop "
            f"every rank has equally many: start {' or '.join(possible) or 'other'} ranks, "
            f"or choose a multiple of {world_size} for micro_batches"
        )
    return micro_batches // world_size


class WholeSteps(Sampler[int]):
    """The samples of an epoch in an order that is the same on every layout, cut off after the last whole step.

    It yields ids for all ranks together, from position 0; a loop that deals batches takes its own from them. `seed` and
    the epoch choose the order (GlobalOrder). What is left over at the end of an epoch, fewer than `global_batch_size`
    samples, is left out; with `shuffle` these are other samples in every epoch. Raises UserError for a data set
    without a length, or with fewer samples than a step takes.
    """

    def __init__(self, dataset: Sized, global_batch_size: int, seed: int = 0, shuffle: bool = True) -> None:
        if not hasattr(dataset, "__len__"):
            raise UserError(
                f"{type(dataset).__name__} has no length, so its samples cannot be dealt the same way on every layout: "
                "use a data set with __len__ and __getitem__"
            )
        if not 0 < global_batch_size <= len(dataset):
            raise UserError(f"a step takes {global_batch_size} samples, but the data set has {len(dataset)}")
        self.epoch = 0
        self._order = GlobalOrder(len(dataset), seed, shuffle)
        self._samples = len(dataset) // global_batch_size * global_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration goes through."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._samples

    def __iter__(self) -> Iterator[int]:
        epoch = self.epoch
        for start in range(0, self._samples, BLOCK):
            yield from self._order.ids(epoch, start, min(start + BLOCK, self._samples)).tolist()


class DealtBatches(KeyedBatches):
    """A batch sampler for one rank of W: every W-th of the sampler's micro-batches of `micro_batch` samples each.

    No sample comes twice. Where the micro-batches do not divide by W, the ranks' numbers of them differ by one.
    """

    def __init__(self, sampler: Sampler[int], micro_batch: int, rank: int, world_size: int) -> None:
        super().__init__(sampler, micro_batch, drop_last=False)
        self._rank, self._world_size = rank, world_size

    def __len__(self) -> int:
        return len(range(self._rank, super().__len__(), self._world_size))

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(super().__iter__(), self._rank, None, self._world_size)


def deal(
    loader: DataLoader[Any],
    micro_batches: int,
    seed: int,
    rank: int,
    world_size: int,
    is_training: Callable[[], bool] | None = None,
) -> DataLoader[Any]:
    """The loader for one rank: its batches are micro-batches, dealt in turn, in an order that no layout changes.

    A loader that shuffles goes through whole steps of `micro_batches` only (WholeSteps). One that does not shuffle goes
    through all samples once. What is drawn for a micro-batch follows from it (`keyed`, which explains `is_training`).
    Raises UserError for a sampler or batch sampler that is not torch's own or DealtBatches, and for a data set without
    a length.
    """
    if isinstance(loader.batch_sampler, DealtBatches):
        return keyed(loader, loader.batch_sampler, seed, is_training)
    sampler = loader.sampler
    if type(sampler) not in (RandomSampler, SequentialSampler, DistributedSampler) or loader.batch_size is None:
        raise UserError(
            f"{type(sampler).__name__} with {type(loader.batch_sampler).__name__} cannot be dealt the same way on every"
            " layout: pass shuffle and batch_size to the DataLoader, or "
            "batch_sampler=DealtBatches(sampler, micro_batch, rank, world_size) from ddp_core.adapters.dealing"
        )
    shuffle = getattr(sampler, "shuffle", isinstance(sampler, RandomSampler))
    step = micro_batches * loader.batch_size if shuffle else 1
    dealt = DealtBatches(WholeSteps(loader.dataset, step, seed, shuffle), loader.batch_size, rank, world_size)  # type: ignore[arg-type]
    return keyed(loader, dealt, seed, is_training)
