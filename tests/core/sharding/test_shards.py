"""Shards: which rank owns which elements, where parameters may be cut, and that they stay what they were."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from ddp_core.reduction.exchange import LINE_BYTES
from ddp_core.reduction.flat import in_memory_order
from ddp_core.reduction.norm import BLOCK
from ddp_core.sharding.shards import Shards, refuse_shared_memory
from tests.support.wording import refusing

SHAPES = [(3,), (), (500, 7), (0, 4), (4, 0), (1,), (2 * BLOCK,), (BLOCK + 1,), (4, 3, 3, 3), (1100, 1000), (5, 5)]
SHAPES += [(200, 77)]


def parameters(shapes: list[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    found = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for parameter in found:
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    found.insert(3, nn.Parameter(torch.randn(1500, generator=generator, dtype=torch.float64)))
    return found


def test_parameters_keep_their_values_strides_and_alignment() -> None:
    before, after = parameters(), parameters()
    objects = list(map(id, after))
    shards = Shards(after, range(3))
    assert list(map(id, shards.parameters)) == objects
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
        assert other.numel() == 0 or other.data_ptr() % min(64, LINE_BYTES) == 0
        assert other.untyped_storage().nbytes() == other.nbytes, "a model's file would hold all other parameters, too"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 16, 100])
def test_every_element_has_one_owner_and_cuts_lie_between_blocks(world_size: int) -> None:
    shards = Shards(parameters(), range(world_size))
    names = list(map(str, range(len(shards.parameters))))
    of_ranks = [shards.owned(rank, names) for rank in range(world_size)]
    for position, parameter in enumerate(shards.parameters):
        pieces = [owned[position] for owned in of_ranks if owned[position].tensor is not None]
        own = sorted(pieces, key=lambda piece: piece.start)
        assert [own[0].start, own[-1].stop] == [0, parameter.numel()]
        assert all(left.stop == right.start for left, right in itertools.pairwise(own))
        assert all(piece.start % BLOCK == 0 for piece in own)
        assert parameter.numel() or len(own) == 1, "what has no element has a state, too"
        values = in_memory_order(parameter.detach(), parameter)
        for piece in own:
            assert piece.tensor.shape == ((piece.stop - piece.start,) if parameter.dim() else ())
            flat = piece.tensor.view(-1)
            assert torch.equal(flat, values[piece.start : piece.stop])
            assert flat.data_ptr() == parameter.data_ptr() + piece.start * parameter.element_size() or not flat.numel()


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_ranks_own_about_as_much(world_size: int) -> None:
    shards = Shards(parameters([(1000, 1000), (1000,), (1000, 2000), (2000,), (2000, 500), (500,)]), range(world_size))
    pieces = [shards.owned(rank, list("abcdefg")) for rank in range(world_size)]
    owned = [sum(each.stop - each.start for each in of_rank) for of_rank in pieces]
    assert max(owned) <= sum(owned) / world_size * 1.02


def test_parameters_that_share_memory_are_refused() -> None:
    memory = torch.zeros(10)
    strided = torch.as_strided(memory, (3, 2), (4, 1))  # its last element is number 9

    def with_tensors(one: torch.Tensor, other: torch.Tensor, buffers: int = 0) -> nn.Module:
        module = nn.Module()
        for number, each in enumerate((one, other)):
            if number < buffers:
                module.register_buffer(f"b{number}", each)
            else:
                module.register_parameter(f"p{number}", nn.Parameter(each))
        return module

    for one, other in ((memory[:6], memory[4:]), (memory[4:], memory[:6]), (memory[9:], strided)):
        for buffers in (0, 1):
            with refusing():
                refuse_shared_memory(with_tensors(one, other, buffers))
        refuse_shared_memory(with_tensors(one, other, buffers=2))
    refuse_shared_memory(with_tensors(torch.as_strided(memory, (2, 2), (4, 1)), memory[6:]))
    tied = with_tensors(memory, torch.zeros(2))
    tied.register_parameter("again", tied.p0)
    refuse_shared_memory(tied)
    with refusing(ValueError):
        Shards([], range(2))
