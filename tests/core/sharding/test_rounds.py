"""Strided shares in which each rank adds up its own part: what is on its way, and passes that all ranks must run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_core.reduction.communication import Channel
from ddp_core.reduction.flat import Gradients
from ddp_core.reduction.norm import BLOCK
from ddp_core.reduction.parts import parts_on
from ddp_core.sharding.owned import Owned
from ddp_core.sharding.parcels import group_parcels
from ddp_core.sharding.rounds import Rounds
from ddp_core.sharding.shards import Shards
from tests.support.thread_group import on_threads, use_threads

UNDER_WAY = 3
ELEMENTS = 3 * BLOCK
"""So each of three ranks owns a part of each weight."""


class Slow:
    """A channel on which nothing arrives before somebody waits for it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.under_way = self.most = 0

    def submit(self, transfer: Any, like: Tensor) -> Any:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return SimpleNamespace(wait=lambda: self.arrive(transfer))

    def arrive(self, transfer: Any) -> Tensor:
        self.under_way -= 1
        try:
            while True:
                next(transfer)
        except StopIteration as end:
            return end.value


class Rank:
    """Rounds of one rank over some weights of different dtypes, so that each is a parcel of its own."""

    def __init__(self, channel: Any, group: Any, size: int, needs_passes: bool) -> None:
        dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(ELEMENTS, dtype=dtype)) for dtype in dtypes[:size])
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        rank = group.rank()
        gradients = Gradients(self.weights)
        shards = Shards(gradients.parameters, range(group.size()))
        own = {piece.position: piece for piece in shards.pieces(rank)}
        self.owned = [
            Owned("", weight, own[place].start, own[place].stop, own[place].tensor)
            if place in own
            else Owned("", weight, 0, 0, None)
            for place, weight in enumerate(gradients.parameters)
        ]
        self.rounds = Rounds(
            group_parcels(shards, rank, gradients),
            [*self.owned, Owned("frozen", self.frozen, 0, 1, nn.Parameter(torch.ones(1)))],
            gradients,
            parts_on(None if group.size() == 1 else group, (), torch.device("cpu")),
            channel,
            UNDER_WAY,
            needs_passes=needs_passes,
        )
        self.statistics = torch.empty(0)

    def run(self, index: int, scale: float = 1.0) -> None:
        with self.rounds.backward(index):
            self.backward(scale)
        self.rounds.push(self.statistics)

    def backward(self, scale: float) -> None:
        sum(scale * weight.sum() for weight in self.weights).backward()  # type: ignore[union-attr]

    def totals(self) -> list[list[float] | None]:
        """The values of the gradients that this rank owns, of each weight."""
        tensors = [own.tensor for own in self.owned if own.tensor is not None]
        return [None if each.grad is None else each.grad.unique().tolist() for each in tensors]


@pytest.fixture(autouse=True)
def on_groups_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)


class Alone:
    """A group of one rank, which sends nothing."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def test_no_more_parcels_are_on_their_way_than_are_allowed() -> None:
    channel = Slow()
    rank = Rank(channel, Alone(), 4, needs_passes=False)
    rank.rounds.begin(3)
    with rank.rounds.backward(0):
        rank.backward(1)
        assert channel.most == UNDER_WAY
    assert channel.under_way == UNDER_WAY
    rank.rounds.push(rank.statistics)
    # A step that was given up has left something on its way.
    rank.rounds.begin(2)
    assert channel.under_way == 0
    rank.run(0)
    rank.run(1)
    rank.rounds.finish(rank.statistics, 0.5)
    assert channel.under_way == 0
    assert rank.totals() == [[1.0]] * 4


def test_a_pass_that_does_not_count_adds_nothing_and_every_rank_runs_as_many() -> None:
    def run(group: Any) -> list[Any]:
        channel = Channel(group, torch.device("cpu"), None)
        rank = Rank(channel, group, 2, needs_passes=True)
        found: list[Any] = [rank.rounds.idle_passes]
        for micro_batches in (4, 1, 3):
            rank.rounds.begin(micro_batches)
            for index in rank.rounds.share(micro_batches):
                rank.run(index, 1 + index)
            found.append(rank.rounds.idle_passes)
            if rank.rounds.idle_passes:
                with pytest.raises(RuntimeError, match="has not run the step's idle pass"):
                    rank.rounds.finish(rank.statistics, 1.0)
            for _ in range(rank.rounds.idle_passes):
                with rank.rounds.idle_pass():
                    rank.backward(1000)
            assert rank.rounds.idle_passes == 0
            rank.rounds.finish(rank.statistics, 1.0)
            found.append(rank.totals())
        channel.close()
        return found

    ranks = on_threads(3, run)
    assert [[found[0], *found[1::2]] for found in ranks] == [[0, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0]]
    assert [found[2::2] for found in ranks] == [[[[10.0]] * 2, [[1.0]] * 2, [[6.0]] * 2]] * 3
