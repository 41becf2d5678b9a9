"""How the samples of an epoch are dealt to ranks in loops that give rank r the micro-batches r, r + W, r + 2W, …"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sized
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from ddp_core.base.errors import UserError
from ddp_core.sampler import BLOCK, GlobalOrder

from .keyed_loading import InSequence, KeyedBatches, keyed

__all__ = ["DealtBatches", "WholeSteps", "accumulation_steps", "deal"]


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
    if getattr(sampler, "shuffle", isinstance(sampler, RandomSampler)):
        sampler = WholeSteps(loader.dataset, micro_batches * loader.batch_size, seed)  # type: ignore[arg-type]
    else:
        sampler = InSequence(loader.dataset)  # type: ignore[arg-type]
    return keyed(loader, DealtBatches(sampler, loader.batch_size, rank, world_size), seed, is_training)
