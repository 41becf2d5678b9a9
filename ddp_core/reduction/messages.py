"""An exchange by sends and receives of single tensors, each under way by itself: what gloo does best."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Arrival, Collected, wait_for


class PointToPoint:
    """Sends and receives between all pairs of members (gloo, and any backend that can send and receive).

    Messages of one pair with one tag arrive in the sequence in which they were sent. So two exchanges of one group may
    be under way at once, on threads of their own, if their tags differ by two or more: each uses two.
    """

    one_round_bytes = 256 * 1024  # About what a connection carries in the time of a round.

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int] | None = None, tag: int = 0) -> None:
        self._group, self._tag = group, tag
        self._members = range(group.size()) if members is None else members
        self.rank, self.world_size = self._members.index(group.rank()), len(self._members)
        # Each member starts with another peer, so that they do not all send to the same member first.
        self.peers = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        self.inboxes = Inboxes()

    def collect(self, own: Sequence[Tensor], like: Tensor, counts: Sequence[int], cuts: Sequence[slice]) -> Collected:
        """See `Exchange.collect`. Waiting raises RuntimeError when a peer is gone or silent for the group's timeout."""
        mine = cuts[self.rank]
        size = mine.stop - mine.start
        foreign = (sum(counts) - counts[self.rank]) * size
        inbox = self.inboxes.take(foreign, like)
        parts = iter(torch.split(inbox[:foreign], size))
        arrivals: list[Arrival] = []
        for peer, count in enumerate(counts):
            if peer == self.rank:
                arrivals += [(flat[mine], None) for flat in own]
            elif size:
                received = [next(parts) for _ in range(count)]
                arrivals += [(part, self.receive(part, peer)) for part in received]
            else:
                arrivals += [(like.new_empty(0), None)] * count
        sent = [
            self.send(flat[cut], peer) for peer in self.peers for flat in own if (cut := cuts[peer]).start < cut.stop
        ]
        return Collected(arrivals, sent, partial(self.inboxes.give_back, inbox))

    def gather(self, flats: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
        """See `Gathers.gather`. With tag 1: sums are gathered while others are collected."""
        works = []
        for flat, cuts in flats:
            parts = [flat[cut] for cut in cuts]
            works += [self.receive(parts[peer], peer, 1) for peer in self.peers if parts[peer].numel()]
            works += [self.send(parts[self.rank], peer, 1) for peer in self.peers if parts[self.rank].numel()]
        wait_for(works)

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> dist.Work:
        """Start to send; `tag`, 0 or 1, is added to that of this exchange."""
        # The group's own methods: dist.isend and dist.irecv cost as much again in checks.
        return self._group.send([tensor], self._members[peer], self._tag + tag)

    def receive(self, tensor: Tensor, peer: int, tag: int = 0) -> dist.Work:
        """Start to receive; `tag`, 0 or 1, is added to that of this exchange."""
        return self._group.recv([tensor], self._members[peer], self._tag + tag)


class Inboxes:
    """Memory for what other members send, to be used again: as many flat tensors as were in use at once."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, elements: int, like: Tensor) -> Tensor:
        """A flat tensor of so many elements or more, with the dtype and device of `like`."""
        free = self._free.setdefault((like.dtype, like.device), [])
        inbox = free.pop() if free else like.new_empty(0)
        return inbox if inbox.numel() >= elements else like.new_empty(elements)

    def give_back(self, inbox: Tensor) -> None:
        """Let it be used again."""
        self._free[inbox.dtype, inbox.device].append(inbox)
