"""A ring and a double tree among processes here, in sends and receives that are counted.

The formulas of `costs` and `nccl` say how many messages follow one another, and how many bytes a rank sends. Here both
algorithms really run, and their sums are compared with `all_reduce`. Every message says how many came before it, one
after the other, so that the longest chain is known at the end: the time that latency takes, in messages.

Sources: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005 (ring); Sanders, Speck, Träff, Parallel Computing 35, 2009 (two
trees, each with half of the tensor: who is an inner node in one of them is a leaf in the other).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lab.claims.measuring.ranks import run_ranks

ELEMENTS = 840 * 16
"""Divisible by 2 to 8 ranks, twice."""


@dataclass
class Counter:
    """Sends and receives among the first `ranks` ranks; `chain` is how many messages came one after the other."""

    rank: int
    ranks: int
    messages: int = 0
    elements: int = 0
    chain: int = 0

    def exchange(self, part: Tensor | None, to: int | None, like: Tensor | None, source: int | None) -> Tensor | None:
        """Send `part` and receive as much as `like` at the same time; either may be left out (None)."""
        requests, count, received = [], torch.tensor(self.chain + 1), torch.zeros((), dtype=torch.int64)
        arrived = None if like is None else torch.empty_like(like)
        if part is not None and to is not None:
            # Rows of a matrix that is contiguous are contiguous, as a send demands.
            requests += [dist.isend(count, to), dist.isend(part, to)]
            self.messages, self.elements = self.messages + 1, self.elements + part.numel()
        if arrived is not None and source is not None:
            requests += [dist.irecv(received, source), dist.irecv(arrived, source)]
        for request in requests:
            assert request is not None
            request.wait()
        self.chain = max(self.chain, int(received))
        return arrived

    def send(self, part: Tensor, to: int) -> None:
        """Send alone."""
        self.exchange(part, to, None, None)

    def receive(self, like: Tensor, source: int) -> Tensor:
        """Receive alone."""
        arrived = self.exchange(None, None, like, source)
        assert arrived is not None
        return arrived


def ring(tensor: Tensor, counter: Counter) -> None:
    """Sum `tensor` over the ranks, in place: chunks go round adding up, then go round complete."""
    rank, ranks = counter.rank, counter.ranks
    chunks = tensor.view(ranks, -1)
    for turn in range(2 * (ranks - 1)):
        out, into = (rank - turn) % ranks, (rank - turn - 1) % ranks
        arrived = counter.exchange(chunks[out], (rank + 1) % ranks, chunks[into], (rank - 1) % ranks)
        assert arrived is not None
        if turn < ranks - 1:
            chunks[into] += arrived
        else:
            chunks[into] = arrived


def double_tree(tensor: Tensor, counter: Counter) -> None:
    """Sum `tensor` over the ranks, in place: each half up and down a tree of its own."""
    halves = tensor.view(2, -1)
    chains = []
    for half, mirrored in ((halves[0], False), (halves[1], True)):
        # The two halves travel at the same time, so the longer of their chains counts.
        counter.chain = 0
        up, down = neighbours(counter.rank, counter.ranks, mirrored)
        for child in down:
            half += counter.receive(half, child)
        if up is not None:
            counter.send(half, up)
            half.copy_(counter.receive(half, up))
        behind = counter.chain
        for child in down:
            counter.chain = behind  # the children's links are different ones
            counter.send(half, child)
        chains.append(counter.chain)
    counter.chain = max(chains)


def neighbours(rank: int, ranks: int, mirrored: bool = False) -> tuple[int | None, list[int]]:
    """A rank's parent (None for the root) and children in a binary tree whose leaves are the odd ranks.

    Ranks that are divisible by a higher power of two stand higher; rank 0 is the root and has one child. The mirrored
    tree has the ranks in reverse, or, where their number is odd, shifted by one, so that its leaves are other ranks.
    """
    if mirrored:
        up, down = neighbours(_moved(rank, ranks, -1), ranks)
        return None if up is None else _moved(up, ranks, 1), [_moved(child, ranks, 1) for child in down]
    children = [child for child in range(1, ranks) if _parent(child, ranks) == rank]
    return (None if rank == 0 else _parent(rank, ranks)), children


def _moved(rank: int, ranks: int, way: int) -> int:
    return (rank + way) % ranks if ranks % 2 else ranks - 1 - rank


def _parent(rank: int, ranks: int) -> int:
    lowest = rank & -rank
    above = (rank ^ lowest) | (lowest << 1)
    return above if above < ranks else rank ^ lowest


def formulas(shape: str, ranks: int) -> dict[str, float]:
    """What the model counts with: messages one after the other, and the tensor's sizes that the busiest rank sends."""
    if shape == "ring":
        return {"chain": 2 * (ranks - 1), "sent": 2 * (ranks - 1) / ranks}
    return {"chain": 2 * math.floor(math.log2(ranks)), "sent": 2.0}


def count(ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Counted beside the formulas, for each number of ranks; `right` says whether the sums were."""
    found = run_ranks(_count, max(ranks), list(ranks), timeout=120)
    rows = []
    for ranks_now in ranks:
        for shape in ("ring", "tree"):
            own = [counted[f"{shape} {ranks_now}"] for counted in found[:ranks_now]]
            rows.append(
                {
                    "shape": shape,
                    "ranks": ranks_now,
                    "messages": max(one["messages"] for one in own),
                    "chain": max(one["chain"] for one in own),
                    "sent": max(one["sent"] for one in own),
                    "right": all(one["right"] for one in own),
                    "formula": formulas(shape, ranks_now),
                }
            )
    return rows


def _count(rank: int, world_size: int, ranks: list[int]) -> dict[str, dict[str, Any]]:
    found = {}
    for now in ranks:
        group = dist.new_group(list(range(now)))
        if rank < now:
            for shape, way in (("ring", ring), ("tree", double_tree)):
                # Whole numbers, whose sums are the same in any order.
                tensor, counter = torch.arange(ELEMENTS, dtype=torch.float32) % 97 + rank, Counter(rank, now)
                expected = tensor.clone()
                dist.all_reduce(expected, group=group)
                way(tensor, counter)
                found[f"{shape} {now}"] = {
                    "messages": counter.messages,
                    "chain": counter.chain,
                    "sent": counter.elements / ELEMENTS,
                    "right": torch.equal(tensor, expected),
                }
        dist.barrier()
    return found


def count_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The counts as a table: each number of ranks with the formula's in brackets where it differs."""
    lines = [
        "",
        "counted: own sends and receives, sums equal to all_reduce's"
        if all(row["right"] for row in rows)
        else "counted: own sends and receives, SUMS WRONG",
        f"{'':8}{'ranks':>6}{'messages one after the other':>34}{'tensors sent by the busiest rank':>36}",
    ]
    for row in rows:
        chain, sent = row["formula"]["chain"], row["formula"]["sent"]
        lines.append(
            f"{row['shape']:8}{row['ranks']:6}{row['chain']:12} counted{chain:6.0f} formula"
            f"{row['sent']:14.3f} counted{sent:8.3f} formula"
        )
    return lines
