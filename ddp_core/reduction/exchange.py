"""How tensors travel between ranks: what a sum asks of an exchange."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LINE_BYTES = 512
"""The parts of a tensor begin at multiples of so many bytes, as tensors do where torch gets them memory on CUDA devices
(kMinBlockSize in c10/cuda/CUDACachingAllocator.h): libraries choose kernels by how their operands are aligned."""


class Awaited(Protocol):
    """What can be waited for."""

    def wait(self) -> object:
        """Until it is done."""


Folding = Generator[None, None, list[Tensor]]
"""Sums on their way, in phases as those of an OrderedSum."""

Arrival = tuple[Tensor, Awaited | None]
"""A tensor that another member sends, and the work to wait for until it is there (None: it is there already)."""


@dataclass
class Collected:
    """What `Exchange.collect` has started: every member's part of all tensors is on its way to that member."""

    arrivals: list[Arrival]
    """This member's part of all members' tensors: those of the first member, of the second, and so on."""
    sent: Sequence[Awaited] = ()
    """What to wait for before this member's own tensors may be overwritten; each once."""
    end: Callable[[], object] = lambda: None
    """Call this when the tensors of `arrivals` are not used any more."""


class Gathers(Protocol):
    """What brings all members' parts of tensors to every member: all ranks of a process group, or some."""

    rank: int
    """The position of this process among the members."""

    def gather(self, flats: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
        """Fill flat tensors, of each of which every member has one part: send this one's part to all, receive theirs.

        Each tensor comes with its parts, one for each member. All of them may be on their way at once.
        """


class Exchange(Gathers, Protocol):
    """One way to carry tensors between members of a process group."""

    world_size: int
    """The number of members."""
    one_round_bytes: int
    """Up to so many bytes more are sent where that saves a round."""

    def collect(self, own: Sequence[Tensor], like: Tensor, counts: Sequence[int], cuts: Sequence[slice]) -> Collected:
        """Start to send every member its part (`cuts`, one for each) of the flat tensors `own`.

        `counts` says how many tensors each member brings. `like` shows dtype and device.
        """


def cut(elements: int, parts: int, dtype: torch.dtype) -> list[slice]:
    """Cut so many elements of a flat tensor into neighbouring parts of about one size; some parts may be empty.

    Every part begins at a multiple of `LINE_BYTES`.
    """
    line = LINE_BYTES // dtype.itemsize
    lines = -(-elements // line)
    borders = [min(elements, lines * part // parts * line) for part in range(parts + 1)]
    return [slice(*pair) for pair in itertools.pairwise(borders)]


def wait_for(works: Iterable[Awaited | None]) -> None:
    """Wait until all of these are done; None is done already."""
    for work in works:
        if work is not None:
            work.wait()
