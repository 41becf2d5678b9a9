"""What the ordered sums ask of whatever carries tensors between the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from .plan import Arrival

LINE_BYTES = 128
"""GPUs read, add and send memory in lines of so many bytes, so the parts of a tensor begin at multiples of it."""


class Collected(Protocol):
    """The parts of all members' tensors that this member is to add up, on their way; then the sums' way back."""

    arrivals: list[Arrival]
    """This member's part of all members' tensors: those of the first member, of the second, and so on."""
    mine: Tensor
    """Where the sum of this member's part belongs."""

    def sent(self) -> None:
        """Wait until this member's own tensors are sent, and may be overwritten."""

    def expect(self) -> None:
        """Wait as `sent` does, and be ready to receive the others' sums."""

    def spread(self) -> None:
        """Start to send the sum in `mine` to all members."""

    def end(self) -> None:
        """Wait until what was started is done and the sums are in `out`; nothing may be used any more.

        Without `spread` only this member's part of `out` holds its sum.
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

        `counts` says how many tensors each member brings. `own` is overwritten, and `out` may be one of it.
        """


class WholeExchange(Exchange, Protocol):
    """An exchange between all ranks of a group, which strided shares need."""

    def scatter(self, flat: Tensor | None, cuts: Sequence[slice], like: Tensor, senders: int) -> Iterator[Tensor]:
        """Send each rank its part of `flat`; yield this rank's parts of ranks 0 … `senders` - 1, in order.

        `flat` is None on the other ranks. `cuts` are the parts, one for each rank: neighbours that make up `flat`, or
        all the same. `like` shows the dtype and device. The tensors that are yielded belong to the caller, `flat` no
        longer does.
        """

    def gather(self, flats: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
        """Send this rank's part of each flat tensor to all ranks, and receive theirs into it: cuts, one for each rank.

        All of them may be on their way at once.
        """
