"""The sum in rounds: the bits of the tree, on any number of ranks, with few sums kept; ranks are threads here."""

from __future__ import annotations

import math
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from ddp_core.reduction import GradientTree
from ddp_core.reduction.round_sum import RoundSum

ELEMENTS = 23


class Mailboxes:
    """An exchange between threads: one queue from each rank to each other."""

    def __init__(self, world_size: int, rank: int, queues: dict[tuple[int, int], queue.Queue[Tensor]]) -> None:
        self.rank, self.world_size, self.queues = rank, world_size, queues
        self.one_round_bytes = -1

    def scatter(self, flat: Tensor | None, cuts: Sequence[slice], like: Tensor, senders: int) -> Iterator[Tensor]:
        if flat is not None:
            for peer, cut in enumerate(cuts):
                self.queues[self.rank, peer].put(flat[cut].clone())
        yield from (self.queues[sender, self.rank].get(timeout=60) for sender in range(senders))

    def gather(self, flats: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
        for flat, cuts in flats:
            for peer in range(self.world_size):
                self.queues[self.rank, peer].put(flat[cuts[self.rank]].clone())
            for sender, cut in enumerate(cuts):
                flat[cut] = self.queues[sender, self.rank].get(timeout=60)


def sum_on_rank(exchange: Mailboxes, leaves: Tensor) -> Tensor:
    total = RoundSum(exchange, ELEMENTS, leaves[0], len(leaves))
    for first in range(0, len(leaves), exchange.world_size):
        flat = total.empty() if first + exchange.rank < len(leaves) else None
        if flat is not None:
            flat[:ELEMENTS] = leaves[first + exchange.rank]
        total.push(flat)
        assert len(total._tree.subtrees) <= math.log2(len(leaves)) + 1
    return total.total()[:ELEMENTS]


@pytest.mark.parametrize("one_round_bytes", [-1, 1 << 20], ids=["in parts", "whole"])
@pytest.mark.parametrize("world_size", range(2, 9))
def test_rounds_of_any_width_give_the_bits_of_the_tree(world_size: int, one_round_bytes: int) -> None:
    queues = {(a, b): queue.Queue[Tensor]() for a in range(world_size) for b in range(world_size)}
    ranks = [Mailboxes(world_size, rank, queues) for rank in range(world_size)]
    for rank in ranks:
        rank.one_round_bytes = one_round_bytes
    with ThreadPoolExecutor(world_size) as threads:
        for micro_batches in range(1, 13):
            generator = torch.Generator().manual_seed(micro_batches)
            scales = 10.0 ** torch.randint(-4, 5, (micro_batches, 1), generator=generator)
            leaves = torch.randn(micro_batches, ELEMENTS, generator=generator) * scales
            tree = GradientTree(micro_batches)
            for leaf in leaves:
                tree.push([leaf.clone()])
            for found in threads.map(sum_on_rank, ranks, [leaves] * world_size):
                assert torch.equal(found, tree.subtrees[0].tensors[0])
