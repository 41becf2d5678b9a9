"""How tensors travel between ranks: what a sum asks of an exchange."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
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


class Collected(Protocol):
    """What `Exchange.collect` has started: every member's part of all tensors is on its way to that member.

    Where each member keeps its own sum, `wait_sent` and `end` follow. Where all members need all sums, `expect_sums`,
    `send_sum` and `end`.
    """

    arrivals: list[Arrival]
    """This member's part of all members' tensors: those of the first member, of the second, and so on."""
    mine: Tensor
    """Where the sum of this member's part belongs."""

    def wait_sent(self) -> None:
        """Wait until this member's own tensors are sent, and may be overwritten."""

    def expect_sums(self) -> None:
        """Wait as `wait_sent` does, and be ready to receive the other members' sums."""

    def send_sum(self) -> None:
        """Start to send the sum in `mine` to all members."""

    def end(self) -> None:
        """Wait until all messages have arrived. The tensors of `arrivals` may not be used any more.

        `out` then holds all members' sums; without `send_sum` only this member's.
        """


class Exchange(Protocol):
    """One way to carry tensors between members of a process group: all of its ranks, or some."""

    rank: int
    """The position of this process among the members."""
    world_size: int
    """The number of members."""
    one_round_bytes: int
    """Up to so many bytes more are sent where that saves a round."""

    def collect(self, own: Sequence[Tensor], out: Tensor, counts: Sequence[int], cuts: Sequence[slice]) -> Collected:
        """Start to send every member its part (`cuts`, one for each) of the flat tensors `own`.

        `counts` says how many tensors each member brings. The tensors of `own` are overwritten, and `out` may be one of
        them.
        """


class Gathers(Protocol):
    """What brings all ranks' parts of tensors to every rank."""

    rank: int
    """The rank of this process."""

    def gather(self, flats: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
        """Fill flat tensors, of each of which every rank has one part: send this rank's part to all, receive theirs.

        Each tensor comes with its parts, one for each rank. All of them may be on their way at once.
        """


class WholeExchange(Exchange, Gathers, Protocol):
    """An exchange between all ranks of a group."""


class Carrier(Protocol):
    """Carries tensors between any ranks of a process group."""

    def carry(
        self, sends: Iterable[tuple[int, Tensor]], receives: Iterable[tuple[int, Tensor]], tag: int = 0
    ) -> tuple[list[dist.Work], list[dist.Work | None]]:
        """Start to send tensors to other ranks, and to receive tensors from them; return the works of both.

        Each tensor comes with its rank; empty ones are left out. Two ranks' tensors arrive in the sequence in which
        they were sent, among those with tag 0 and among those with tag 1. A work of a tensor that is received is None
        if it is there.
        """


def cut(elements: int, parts: int, dtype: torch.dtype) -> list[slice]:
    """Cut so many elements of a flat tensor into neighbouring parts of about one size; some parts may be empty.

    Every part begins at a multiple of `LINE_BYTES`.
    """
    line = LINE_BYTES // dtype.itemsize
    lines = -(-elements // line)
    borders = [min(elements, lines * part // parts * line) for part in range(parts + 1)]
    return [slice(*pair) for pair in itertools.pairwise(borders)]
