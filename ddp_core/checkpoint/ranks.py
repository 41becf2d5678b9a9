"""What the ranks that write the parts of one checkpoint tell each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


class Ranks:
    """The ranks of a process group that nothing else uses, each of which writes a part of every checkpoint.

    `place` is what messages call this rank. All ranks call the same methods in the same sequence. A rank that is gone,
    or silent for longer than the group's timeout, is a RuntimeError of the others.
    """

    def __init__(self, group: dist.ProcessGroup, place: str) -> None:
        self.rank, self.count, self.place = group.rank(), group.size(), place
        self._group: dist.ProcessGroup | None = group

    @classmethod
    @contextlib.contextmanager
    def meeting(cls, place: str, timeout: float) -> Iterator[Self]:
        """All ranks of this launch, in a process group of their own that ends with the block; a collective.

        `timeout`: in seconds. gloo carries it, since files are written by threads that must not wait for a GPU.
        """
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout), group_desc="checkpoints")
        assert isinstance(group, dist.ProcessGroup)
        ranks = cls(group, place)
        del group
        try:
            yield ranks
        finally:
            ranks.end()

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that commits."""
        return self.rank == 0

    def gather(self, own: Value) -> list[Value]:
        """What each rank gives, by rank, on every rank."""
        values = [own] * self.count
        dist.all_gather_object(values, own, group=self._group)
        return values

    def hear_first(self, own: Value) -> Value:
        """What the first rank gives, on every rank."""
        box: list[Any] = [own]
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        value: Value = box[0]
        return value

    def end(self) -> None:
        """Destroy the process group, unless an error has already ended all groups."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
