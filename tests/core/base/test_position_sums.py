"""A checksum that pieces of a tensor add up to, and that any one change changes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from ddp_core.base.position_sums import position_sum

SIZES = (0, 1, 3, 1000, 16336 * 2 + 5, 60001)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pieces_add_up_to_the_whole(dtype: torch.dtype) -> None:
    draws = random.Random(5)
    for size in SIZES:
        whole = (torch.rand(size, generator=torch.Generator().manual_seed(size)) * 100).to(dtype)
        cuts = sorted([0, size, *(draws.randrange(size + 1) for _ in range(3))])
        pieces = [position_sum(whole[start:stop], start).item() for start, stop in itertools.pairwise(cuts)]
        assert (sum(pieces) - position_sum(whole).item()) % 2**64 == 0, (size, cuts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_or_two_elements_that_change_places_change_it(dtype: torch.dtype) -> None:
    draws = random.Random(7)
    for size in SIZES[1:]:
        whole = (torch.rand(size, generator=torch.Generator().manual_seed(size)) * 100).to(dtype)
        changed = whole.clone()
        changed.view(torch.uint8)[draws.randrange(size * whole.element_size())] ^= 1 << draws.randrange(8)
        assert position_sum(changed) != position_sum(whole)
        if size > 1 and whole[0] != whole[-1]:
            turned = whole.clone()
            turned[0], turned[-1] = whole[-1], whole[0]
            assert position_sum(turned) != position_sum(whole)


def test_elements_count_as_they_lie_in_memory() -> None:
    images = torch.rand(8, 3, 5, 5).to(memory_format=torch.channels_last)
    assert position_sum(images) == position_sum(images.permute(0, 2, 3, 1).reshape(-1))
    assert position_sum(torch.ones(4, 6)[:, ::2]) == position_sum(torch.ones(12))
    assert position_sum(torch.tensor(3.0).expand(2)) == position_sum(torch.tensor([3.0, 3.0]))
