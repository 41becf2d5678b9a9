"""Samples that have just been loaded are read again and compared: whatever comes out differently cannot be repeated.

What was digested before training is a sample of the data, so the random ones may not have been in it. Here those that
are trained are looked at, a micro-batch now and then in the first epoch of a start: a longer epoch shows more of them.
"""

from __future__ import annotations

import time

from torch import Tensor

from ddp_core.base.digests import bytes_of, same_bits
from ddp_core.data.trees import Batch, tensors_of
from ddp_core.observe.step import StepBatch, StepObserver
from ddp_core.trainers.batches import Batches

_SHARE = 0.003
"""Of the time of training, what reading again may take, beside steps 1, 2, 4, 8, …"""
_NAMED = 3


class ReadTwice(StepObserver):
    """Reads micro-batches of this process a second time, with the keys that they were read with, before they are used.

    It does so in this process, whoever loaded them first, and stops at the first difference, or with the epoch. The
    data sets of `ddp_core`, which draw nothing, are not read again.
    """

    def __init__(self, batches: Batches) -> None:
        self.finding: str | None = None
        """What came out differently, in words."""
        self._batches = batches
        self._epoch: int | None = None
        self.is_over = False
        """Whether nothing is read again any more."""
        self._steps = self._read = 0
        self._began = self._spent = self._last = 0.0

    def before_step(self, batch: StepBatch) -> None:
        if self._epoch is None:
            self._epoch, self._began = batch.epoch, time.perf_counter()
        if not self.is_on(batch.epoch) or self.finding is not None or not batch.micro_batches:
            return
        self._steps += 1
        before = time.perf_counter()
        if self._steps.bit_count() > 1 and self._spent + self._last > _SHARE * (before - self._began):
            return
        self.finding = self._compare(batch, self._read % len(batch.micro_batches))
        self._read += 1
        self._last = time.perf_counter() - before
        self._spent += self._last

    def is_on(self, epoch: int) -> bool:
        """Whether samples are read again in this epoch; the same on every rank."""
        return self._batches.loader.may_draw and not self.is_over and self._epoch in (None, epoch)

    def stop(self) -> None:
        """Read nothing again from here on; called on all ranks."""
        self.is_over = True

    def _compare(self, batch: StepBatch, number: int) -> str | None:
        part, ids = batch.micro_batches[number], batch.ids[number]
        try:
            again = self._batches.loader.fetch(batch.epoch, ids, self._batches.key(batch.step, part))
        except Exception as error:
            return f"samples {_few(ids.tolist())} cannot be read again in step {batch.step + 1} ({_line(error)})"
        rows = _differing_rows(batch.tensors[number], again, len(ids))
        if not rows:
            return None
        found = [number for row, number in enumerate(ids.tolist()) if row in rows]
        words = f"samples {_few(found)} are" if len(found) > 1 else f"sample {found[0]} is"
        return f"{words} not the same when read again in step {batch.step + 1}"


def _differing_rows(first: Batch, again: Batch, count: int) -> set[int]:
    """Which of `count` samples differ; all of them where that cannot be told."""
    ours, theirs = list(tensors_of(first)), list(tensors_of(again))
    if len(ours) != len(theirs):
        return set(range(count))
    rows: set[int] = set()
    for one, other in zip(ours, theirs, strict=True):
        if same_bits(one, other):
            continue
        if one.shape != other.shape or one.dtype != other.dtype or one.dim() == 0 or len(one) != count:
            return set(range(count))
        rows.update((_bytes_of_rows(one) != _bytes_of_rows(other)).any(dim=1).nonzero().flatten().tolist())
    return rows


def _bytes_of_rows(tensor: Tensor) -> Tensor:
    return bytes_of(tensor).view(len(tensor), -1)


def _few(ids: list[int]) -> str:
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return ", ".join(map(str, ids[:_NAMED])) + more


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
