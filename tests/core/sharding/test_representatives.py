"""The parameters that stand for all of an optimizer's: one of each kind, in its size, memory format and attributes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_core.sharding.representatives import Representative, cropped, kind_of, representatives


def like(tensor: Tensor, **attributes: Any) -> nn.Parameter:
    parameter = nn.Parameter(tensor)
    vars(parameter).update(attributes)
    return parameter


def test_parameters_of_one_kind_differ_in_values_alone() -> None:
    weight = torch.zeros(2, 3, 1, 2)
    assert kind_of(like(weight)) == kind_of(like(weight + 1))
    kinds = [
        like(weight),
        like(weight.view(2, 3, 2, 1)),
        like(weight.contiguous(memory_format=torch.channels_last)),
        like(weight.double()),
        like(weight, scale=1.0),
        like(weight, scale=2.0),
        like(weight, marks=[1]),
        like(weight, marks={1: 1}),
    ]
    assert len({kind_of(each) for each in kinds}) == len(kinds)
    # No rule can compare these but by what they are.
    assert kind_of(like(weight, marks=[1])) == kind_of(like(weight, marks=[2]))
    # Where there is one row, its stride is arbitrary.
    assert kind_of(like(torch.zeros(1, 3))) == kind_of(like(torch.zeros(7).as_strided((1, 3), (7, 1))))


@pytest.mark.parametrize(
    "real",
    [
        torch.zeros(4, 5),
        torch.zeros(4, 5).t(),
        torch.zeros(2, 3, 4, 5, dtype=torch.float64).contiguous(memory_format=torch.channels_last),
        torch.zeros(2, 3, 4, dtype=torch.bfloat16).permute(1, 2, 0),
        torch.zeros(0, 3),
        torch.zeros(()),
    ],
)
def test_a_representative_lies_in_memory_as_the_real_one_does(real: Tensor) -> None:
    one = Representative(like(real, mark="mine"), tuple(real.shape))
    whole = one.whole(1.0, 3)
    assert (whole.shape, whole.stride(), whole.dtype) == (real.shape, real.stride(), real.dtype)
    assert vars(whole) == {"mark": "mine"}
    gradient = one.gradient(1.0, 3)
    assert (gradient.shape, gradient.stride(), gradient.dtype) == (real.shape, real.stride(), real.dtype)
    assert torch.equal(gradient, whole), "the same seed"
    assert real.numel() < 2 or not torch.equal(gradient, one.gradient(1.0, 4))


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_values_are_random_and_of_about_the_scale_and_the_last_are_larger(scale: float) -> None:
    values = Representative(like(torch.empty(100_000)), (100_000,)).gradient(scale, 1)
    first, last = values[:10_000].std().item() / scale, values[-10_000:].std().item() / scale
    assert 0.5 < first < 1.0 < last < 2.0
    assert last > 2 * first
    assert abs(values.mean().item()) < 0.01 * scale


@pytest.mark.parametrize("shape", [(8192,), (3, 3000), (1000, 1000), (64, 64, 3, 3), (2, 2, 2), (1, 1)])
@pytest.mark.parametrize("most", [1, 2, 100, 5000])
def test_a_cropped_shape_has_odd_lengths_and_is_no_smaller_than_it_must_be(shape: tuple[int, ...], most: int) -> None:
    found = cropped(shape, most)
    assert math.prod(found) <= most
    assert all(size == whole or (size % 2 and size < whole) for size, whole in zip(found, shape, strict=True))
    if math.prod(shape) <= most:
        assert found == shape
    elif most > 1000:
        assert math.prod(found) > 0.45 * most
    elif most > 2:
        assert math.prod(found) > 0.2 * most


def shapes(groups: list[list[tuple[int, ...]]], elements: int) -> list[list[tuple[int, ...]]]:
    made = [{"params": [nn.Parameter(torch.zeros(shape)) for shape in group]} for group in groups]
    chosen = representatives(torch.optim.SGD(made, lr=0.1), elements)
    return [[each.shape for each in members] for members in chosen]


def test_each_kind_is_chosen_once_in_its_size_where_all_fit() -> None:
    groups = [[(8, 3), (5,), (8, 3), (5,)], [(5,)]]
    assert shapes(groups, 8 * 3 + 5 + 5) == [[(8, 3), (5,)], [(5,)]]


def test_the_largest_are_cropped_where_all_are_too_large() -> None:
    (found,) = shapes([[(8192,), (1, 8192)]], 10_000)
    assert 4000 < math.prod(found[0]) == math.prod(found[1]) < 5000
    ((_, small),) = shapes([[(8192,), (3,)]], 1000)
    assert small == (3,)
    for elements in (1, 2, 3):
        assert shapes([[(8,), (4, 2), (2, 4)]], elements) == [[(1,), (1, 1), (1, 1)]]


def test_a_group_of_one_kind_has_a_small_neighbour() -> None:
    assert shapes([[(500,), (500,), (500,)], [(500,), (500,)], [(500,)]], 10_000) == [
        [(500,), (61,)],
        [(500,), (61,)],
        [(500,)],
    ]
