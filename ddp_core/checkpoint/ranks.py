"""Several ranks that save one checkpoint together: what they tell each other, errors included."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch.distributed as dist

from ddp_core.base.errors import UserError

Given = TypeVar("Given")


class Ranks:
    """The ranks of a process group that nothing else uses, each of which writes a part of every checkpoint.

    `place` is what messages call this rank. All ranks call the same methods in the same sequence. Where a rank is gone,
    or silent for longer than the group's timeout, the others get a RuntimeError.
    """

    def __init__(self, group: dist.ProcessGroup, place: str) -> None:
        self.rank, self.count, self.place = group.rank(), group.size(), place
        self._group: dist.ProcessGroup | None = group

    @classmethod
    @contextlib.contextmanager
    def meeting(cls, place: str, timeout: float) -> Iterator[Self]:
        """All ranks of this launch, in a process group of their own that ends with the block; a collective.

        `timeout`: in seconds. The backend is gloo, since files are written by threads that must not wait for a GPU.
        """
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout), group_desc="checkpoints")
        assert isinstance(group, dist.ProcessGroup)
        ranks = cls(group, place)
        del group
        try:
            yield ranks
        finally:
            ending, ranks._group = ranks._group, None
            if dist.is_initialized():  # else an error has already ended all groups
                dist.destroy_process_group(ending)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that commits."""
        return self.rank == 0

    def gather(self, own: Given) -> list[Given]:
        """What each rank gives, by rank, on every rank."""
        values = [own] * self.count
        dist.all_gather_object(values, own, group=self._group)
        return values

    def hear_first(self, own: Given) -> Given:
        """What the first rank gives, on every rank."""
        box: list[Any] = [own]
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        value: Given = box[0]
        return value


def told(error: Exception, place: str) -> Exception:
    """The error that the other ranks raise where the rank called `place` has met `error`."""
    if isinstance(error, UserError):
        return type(error)(f"{place}: {error}", error.exit_code)
    return RuntimeError(f"{place} could not save a checkpoint: {type(error).__name__}: {error}")


@contextlib.contextmanager
def telling_others(ranks: Ranks | None) -> Iterator[None]:
    """Tell the other ranks an error of the block: they wait for this rank's data file, and raise the error instead."""
    try:
        yield
    except Exception as error:
        if ranks is not None:
            with contextlib.suppress(Exception):  # the first error is the one to raise
                ranks.gather(told(error, ranks.place))
        raise
