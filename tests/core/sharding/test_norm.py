"""The norm of a gradient of which each rank has a part: the bits of the whole gradient's norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from ddp_core.reduction import gradient_norm
from ddp_core.reduction.flat import in_memory_order
from ddp_core.sharding.norm import norm_of_owned
from ddp_core.sharding.owned import Owned, Rows
from ddp_core.sharding.shards import Shards
from tests.core.reduction.test_norm import with_gradients


class OneAfterTheOther:
    """A channel between ranks that are asked one after the other: twice, since only then all numbers are known."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.numbers: list[Tensor] = []
        self.total: Tensor | None = None

    def sum(self, own: Sequence[Tensor], out: Tensor, micro_batches: int) -> None:
        if self.total is None:
            self.numbers.append(own[0].clone())
        else:
            out.copy_(self.total)


def norms_of(ranks: Sequence[Sequence[Owned]]) -> list[Tensor]:
    channel: Any = OneAfterTheOther()
    for owned in ranks:
        norm_of_owned(owned, channel, len(ranks))
    channel.total = torch.stack(channel.numbers).sum(0)
    assert sum((numbers != 0).int() for numbers in channel.numbers).max() <= 1, "a number has two owners"
    return [norm_of_owned(owned, channel, len(ranks)) for owned in ranks]


def with_gradient(owned: Owned, whole: nn.Parameter) -> Owned:
    if whole.grad is not None and owned.tensor is not None:
        owned.tensor.grad = owned.filled(in_memory_order(whole.grad, whole)[owned.start : owned.stop])
    return owned


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 16])
def test_pieces_have_the_norm_of_the_whole_to_the_last_bit(world_size: int) -> None:
    trained = with_gradients()
    expected = gradient_norm(trained)
    shards, ranks = Shards(trained, range(world_size)), []
    for rank in range(world_size):
        pieces = {piece.position: piece for piece in shards.pieces(rank)}
        ranks.append(
            [
                with_gradient(Owned("", each, pieces[at].start, pieces[at].stop, pieces[at].tensor), each)
                if at in pieces
                else Owned("", each, 0, 0, None)
                for at, each in enumerate(trained)
            ]
        )
    assert all(torch.equal(norm, expected) for norm in norms_of(ranks))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 16])
def test_rows_have_the_norm_of_the_whole_to_the_last_bit(world_size: int) -> None:
    trained = [each for each in with_gradients() if each.dim() and each.is_contiguous()]
    expected = gradient_norm(trained)

    def rows(whole: nn.Parameter, rank: int) -> Owned:
        parts = whole.detach().split(max(1, -(-whole.shape[0] // world_size)))
        local = parts[rank].reshape(-1) if rank < len(parts) else whole.new_empty(0)
        found = Rows("", whole, local, rank, world_size)
        assert found.stop - found.start == local.numel()
        return with_gradient(found, whole)

    ranks = [[rows(each, rank) for each in trained] for rank in range(world_size)]
    assert all(torch.equal(norm, cast(Tensor, expected)) for norm in norms_of(ranks))
