"""Shards: which rank owns which elements, where parameters may be cut, and that they stay what they were."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from ddp_core.reduction.exchange import LINE_BYTES
from ddp_core.reduction.flat import in_memory_order
from ddp_core.reduction.norm import BLOCK
from ddp_core.sharding.shards import Shards, refuse_shared_memory, shard_groups
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
    pieces = [piece for rank in range(world_size) for piece in shards.pieces(rank)]
    for position, parameter in enumerate(shards.parameters):
        own = sorted((piece for piece in pieces if piece.position == position), key=lambda piece: piece.start)
        assert [own[0].start, own[-1].stop] == [0, parameter.numel()]
        assert all(left.stop == right.start for left, right in itertools.pairwise(own))
        assert all(piece.start % BLOCK == 0 for piece in own)
        assert parameter.numel() or len(own) == 1, "what has no element has a state, too"
        values = in_memory_order(parameter.detach(), parameter)
        for piece in own:
            assert piece.tensor.shape == ((piece.stop - piece.start,) if parameter.dim() else ())
            flat = piece.tensor.view(-1)
            assert torch.equal(flat, values[piece.start : piece.stop])
            assert torch.equal(flat, shards.groups[piece.group].flat[piece.place])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 16])
def test_flat_tensors_are_cut_where_it_is_nearest_to_equal_parts(world_size: int) -> None:
    for group in Shards(parameters(), range(world_size)).groups:
        size = group.flat.numel()
        assert len(group.cuts) == world_size
        assert (group.cuts[0].start, group.cuts[-1].stop) == (0, size)
        allowed = {size, *group.starts}
        for start, parameter in zip(group.starts, group.like, strict=False):
            allowed |= set(range(start, start + parameter.numel(), BLOCK))
        for rank, (left, right) in enumerate(itertools.pairwise(group.cuts), start=1):
            wanted = size * rank // world_size
            assert left.stop == right.start
            assert abs(left.stop - wanted) == min(abs(place - wanted) for place in allowed)


def test_a_parameter_of_a_megabyte_has_a_flat_tensor_to_itself() -> None:
    sizes = [10, 2**18, 20, 2**18 - 1, 2**18 + 1, 30]
    like = [torch.empty(size, device="meta") for size in sizes]
    assert shard_groups(like) == [[0, 2, 3, 5], [1], [4]]


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_ranks_own_about_as_much(world_size: int) -> None:
    shards = Shards(parameters([(1000, 1000), (1000,), (1000, 2000), (2000,), (2000, 500), (500,)]), range(world_size))
    owned = [sum(piece.tensor.numel() for piece in shards.pieces(rank)) for rank in range(world_size)]
    assert max(owned) <= sum(owned) / world_size * 1.02


def test_a_piece_shares_the_memory_of_its_parameter_and_stays_the_same_object() -> None:
    weight = nn.Parameter(torch.zeros(3 * BLOCK))
    shards = Shards([weight], range(3))
    for rank in range(3):
        (piece,) = shards.pieces(rank)
        assert shards.pieces(rank)[0].tensor is piece.tensor
        with torch.no_grad():
            piece.tensor.add_(rank + 1)
    assert weight.view(3, BLOCK)[:, 0].tolist() == [1.0, 2.0, 3.0]


def test_flattened_gradients_lie_as_their_parameters_do() -> None:
    shards = Shards(parameters(), range(4))
    for group in shards.groups:
        gradients = [torch.randn_like(parameter) for parameter in group.like]
        flat = group.flattened([None if number == 1 else each for number, each in enumerate(gradients)])
        for number, (view, gradient) in enumerate(zip(group.views(flat), gradients, strict=True)):
            if number == 1:
                assert torch.equal(torch.copysign(torch.ones(()), view.float()), -torch.ones(view.shape))
            else:
                assert torch.equal(view, gradient)


def test_the_gradient_of_a_parameter_alone_is_sent_as_it_lies() -> None:
    (group,) = Shards(
        [nn.Parameter(torch.zeros(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))], range(2)
    ).groups
    gradient = torch.randn_like(group.like[0])
    assert group.flattened([gradient]).data_ptr() == gradient.data_ptr()
    for other in (gradient.contiguous(), gradient.double()):
        flat = group.flattened([other])
        assert flat.dtype == torch.float32
        assert torch.equal(flat, in_memory_order(gradient, group.like[0]))
    assert torch.equal(group.flattened([None]), torch.full((48,), -0.0))


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
