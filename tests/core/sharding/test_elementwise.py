"""Which optimizers can be sharded: those of torch that are listed, and those that say so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ddp_core.sharding.updates import require_elementwise
from tests.support.wording import refusing

ELEMENTWISE = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


class Own(torch.optim.SGD):
    """As somebody's own rule, which says nothing."""


class Marked(Own):
    elementwise = True


def parameters() -> list[Tensor]:
    return [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(()))]


@pytest.mark.parametrize("kind", [*(getattr(torch.optim, name) for name in ELEMENTWISE), Marked])
def test_elementwise_optimizers_are_accepted(kind: type[torch.optim.SGD]) -> None:
    require_elementwise(kind(parameters(), lr=0.1))


def test_every_optimizer_of_torch_is_judged() -> None:
    """One that a later torch brings is to be looked at: does it need more than an element, and why?"""
    names = {
        name
        for name in dir(torch.optim)
        if isinstance(kind := getattr(torch.optim, name), type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert names - {"Optimizer", "Adafactor", "LBFGS", "Muon", "SparseAdam"} == set(ELEMENTWISE)


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.LBFGS,
        torch.optim.Adafactor,
        torch.optim.SparseAdam,
        lambda trained: torch.optim.Muon([each for each in trained if each.dim() == 2]),
        # Also one that is derived from an optimizer of torch has to say it: it may do anything else in its step.
        Own,
    ],
    ids=["LBFGS", "Adafactor", "SparseAdam", "Muon", "one's own"],
)
def test_others_are_refused_with_the_reason(make: Callable[..., torch.optim.Optimizer]) -> None:
    with refusing() as refused:
        require_elementwise(make(parameters()))
    assert "\n" not in str(refused.value)
