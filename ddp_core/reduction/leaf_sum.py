"""The sum in rounds (`round_sum`) of leaves that consist of many tensors."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from .communication import Channel, Transfer, in_last_phase
from .flat import fill_, flat_groups, record_use, views_of
from .ordered_sum import OrderedSum
from .parts import Parts
from .round_sum import RoundSum


class LeafSum:
    """One step's sum over `leaves` leaves, each of tensors like those of `like`, which travel in a few flat tensors.

    Collective: every rank makes the same calls in the same order. They are carried out in the background.
    """

    def __init__(self, parts: Parts, channel: Channel, like: Sequence[Tensor], leaves: int) -> None:
        self._channel = channel
        self._groups = flat_groups(like)
        self._like = [[like[position] for position in positions] for positions in self._groups]
        self._sums = [RoundSum(parts, sum(map(Tensor.numel, group)), group[0], leaves) for group in self._like]
        # A group is laid end to end only when its turn has come: copies of gradients must not pile up.
        self._under_way = threading.BoundedSemaphore(OrderedSum.PHASES)

    def push(self, leaf: Sequence[Tensor | None] | None) -> list[torch.futures.Future[Tensor]]:
        """Start to exchange the next round; `leaf` (None on a rank without one) is free again when that is done."""
        futures = []
        for positions, like, total in zip(self._groups, self._like, self._sums, strict=True):
            tensors = None if leaf is None else [leaf[position] for position in positions]
            futures.append(self._channel.submit(self._pushing(total, like, tensors), like[0]))
        return futures

    def totals(self) -> list[Tensor]:
        """Wait until all rounds are done; return the sums of the tensors of a leaf."""
        totals = [
            self._channel.submit(in_last_phase(total.total), like[0])
            for like, total in zip(self._like, self._sums, strict=True)
        ]
        found: dict[int, Tensor] = {}
        for positions, like, total in zip(self._groups, self._like, totals, strict=True):
            found |= dict(zip(positions, views_of(total.wait(), like), strict=True))
        return [found[position] for position in range(len(found))]

    def _pushing(self, total: RoundSum, like: Sequence[Tensor], tensors: Sequence[Tensor | None] | None) -> Transfer:
        with self._under_way:
            flat = None
            if tensors is not None:
                flat = total.empty()
                fill_(views_of(flat, like), tensors)
                record_use(tensors)
            yield from total.push(flat)
        return like[0]
