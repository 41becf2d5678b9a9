"""Models whose parameters cannot be cut between ranks are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_core.sharding.blocks import blocks_of, refuse_unsuitable
from tests.support.wording import refusing


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1, 1)


def doubled(weight: Tensor) -> None:
    weight.grad.mul_(2)


@pytest.mark.parametrize(
    "put",
    [lambda weight: weight.register_hook(clamped), lambda weight: weight.register_post_accumulate_grad_hook(doubled)],
    ids=["hook", "after accumulation"],
)
def test_a_hook_on_a_weight_is_not_lost_silently(put: Callable[[Tensor], Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    refuse_unsuitable(model)
    handle = put(model[1].weight)
    with refusing():
        refuse_unsuitable(model)
    handle.remove()
    refuse_unsuitable(model)


class Number(nn.Module):
    """Its only parameter has no dimension, so that it has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    "model",
    [nn.PReLU(0, init=0.0), Number(), nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)],
    ids=["no elements", "no rows", "not row by row"],
)
def test_a_weight_without_elements_or_rows_is_refused(model: nn.Module) -> None:
    with refusing():
        refuse_unsuitable(nn.Sequential(nn.Linear(3, 2), model))


def test_blocks_are_the_innermost_parts_of_containers_that_are_large_enough() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block = nn.Linear(8, 8), _Block(nn.Linear(8, 8))
            self.stages = nn.Sequential(nn.Sequential(_Block(nn.Linear(8, 8)), nn.Linear(4, 4)), nn.ModuleList())
            self.named = nn.ModuleDict({"deep": nn.ModuleList([nn.Linear(8, 8)]), "small": nn.Linear(2, 8)})

    model = Model()
    stage, small = model.stages[0], model.named["small"]
    deep = model.named["deep"][0]  # type: ignore[index]
    assert blocks_of(model, fewest_elements=20) == [stage[0], stage[1], deep, small]  # type: ignore[index]
    assert blocks_of(model, fewest_elements=24) == [stage[0], deep, small]  # type: ignore[index]
    assert blocks_of(model, fewest_elements=25) == [stage[0], deep]  # type: ignore[index]


def test_a_layer_that_stands_in_two_blocks_stays_with_the_model() -> None:
    shared, same = nn.Linear(8, 8), nn.Linear(8, 8)
    model = nn.Sequential(_Block(shared), _Block(shared), _Block(nn.Linear(8, 8)), same, same)
    assert blocks_of(model, fewest_elements=1) == [model[2], same]


class _Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.own, self.inner = nn.Linear(8, 8), inner
