"""The elements of a parameter that a rank owns: which they are, and in which memory its optimizer updates them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ddp_core.checkpoint import CutTensor
from ddp_core.reduction.exchange import LINE_BYTES
from ddp_core.sharding.owned import Owned, Rows
from tests.support.wording import refusing

LINE = LINE_BYTES // 4
IMAGE = nn.Parameter(torch.arange(24.0).view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last))
IN_MEMORY = IMAGE.detach().permute(0, 2, 3, 1).reshape(-1)


def piece(start: int, stop: int) -> Owned:
    return Owned("image", IMAGE, start, stop, nn.Parameter(IN_MEMORY[start:stop].clone()))


def in_pieces(values: Tensor, *borders: int) -> CutTensor:
    """A whole tensor as a checkpoint in parts has it."""
    flat = values.as_strided((values.numel(),), (1,))
    pieces = {start: flat[start:stop].clone() for start, stop in itertools.pairwise((0, *borders, values.numel()))}
    return CutTensor(values.dtype, tuple(values.shape), values.stride(), pieces)


def test_owned_elements_are_counted_as_they_lie_in_memory_whatever_they_are_read_from() -> None:
    own, values = piece(5, 17), IMAGE.detach() + 100
    expected = IN_MEMORY[5:17] + 100
    assert torch.equal(own.of_whole(values), expected)
    assert torch.equal(own.of_whole(values.contiguous()), expected), "of other strides"
    assert torch.equal(own.of_whole(in_pieces(values, 3, 11)), expected)
    assert torch.equal(own.of_whole(in_pieces(values.contiguous(), 3, 11)), expected), "saved with other strides"
    assert own.cut_blocks(4) == []


def test_no_other_part_of_a_checkpoint_is_read() -> None:
    parts = in_pieces(IMAGE.detach(), 8, 16)
    foreign = {start: values if start == 8 else values.to("meta") for start, values in parts.pieces.items()}
    own = piece(9, 15).of_whole(CutTensor(parts.dtype, parts.shape, parts.strides, dict(sorted(foreign.items()))))
    assert own.shape == (6,)


@pytest.mark.parametrize("make", [lambda: piece(5, 17), lambda: Rows("image", IMAGE, torch.ones(12), 0, 2)])
def test_values_of_another_shape_are_refused_by_name(make: Callable[[], Owned]) -> None:
    with refusing(ValueError):
        make().of_whole(torch.ones(24))


SHAPES = [(5,), (7, 3), (2, 40), (16, 16), (3, 1, 11), (33,)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_all_ranks_are_the_whole_and_are_updated_line_by_line(shape: tuple[int, ...], world_size: int) -> None:
    whole = nn.Parameter(torch.randn(shape))
    chunks, flat = whole.detach().chunk(world_size), whole.detach().view(-1)
    place = 0
    for rank in range(world_size):
        local = chunks[rank].clone().view(-1) if rank < len(chunks) else torch.empty(0)
        rows = Rows("weight", whole, local, rank, world_size)
        assert (rows.start, rows.stop) == (place, place + local.numel())
        place = rows.stop
        tensor = rows.tensor.detach()
        assert torch.equal(tensor[rows.inside], flat[rows.start : rows.stop])
        begin = rows.start - rows.inside.start
        if not local.numel():
            assert tensor.numel() == 0
            continue
        assert begin % LINE == 0
        assert 0 <= rows.inside.start < LINE
        assert (begin + tensor.numel()) % LINE == 0 or begin + tensor.numel() == whole.numel()
        assert begin + tensor.numel() - rows.stop < LINE
        # Where rows are whole lines, there is one memory; else each has what the other one is told to give.
        tensor.fill_(1)
        rows.give()
        assert local.tolist() == [1.0] * local.numel()
        local.fill_(2)
        rows.take()
        assert tensor[rows.inside].tolist() == [2.0] * local.numel()
        assert tensor.numel() > local.numel() or tensor.data_ptr() == local.data_ptr()
    assert place == whole.numel()
