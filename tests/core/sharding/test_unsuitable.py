"""Models whose parameters cannot be cut between ranks are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.sharding.blocks import blocks_of, refuse_unsuitable


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1, 1)


def doubled(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.mul_(2)


@pytest.mark.parametrize(
    "put",
    [
        lambda weight: weight.register_hook(clamped),
        lambda weight: weight.register_post_accumulate_grad_hook(doubled),
    ],
    ids=["hook", "after accumulation"],
)
def test_a_hook_on_a_weight_is_not_lost_silently(put: Callable[[Tensor], Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    refuse_unsuitable(model)
    handle = put(model[1].weight)
    with pytest.raises(UserError, match=r"1\.weight has a hook on its gradient.*use shard mode gradients"):
        refuse_unsuitable(model)
    handle.remove()
    refuse_unsuitable(model)


def test_a_weight_without_elements_is_refused() -> None:
    with pytest.raises(UserError, match=r"0\.weight has no elements.*use shard mode gradients"):
        refuse_unsuitable(nn.Sequential(nn.PReLU(0, init=0.0), nn.Linear(3, 2)))


def test_a_layer_that_stands_in_two_blocks_stays_with_the_model() -> None:
    shared, same = nn.Linear(8, 8), nn.Linear(8, 8)
    model = nn.Sequential(_Block(shared), _Block(shared), _Block(nn.Linear(8, 8)), same, same)
    assert blocks_of(model, fewest_elements=1) == [model[2], same]


class _Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.own, self.inner = nn.Linear(8, 8), inner
