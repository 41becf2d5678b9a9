"""Which optimizers can be sharded, and that finding this out changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.sharding.elementwise import per_element, require_elementwise

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, **how: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, **how),
    "adam": lambda parameters, **how: torch.optim.Adam(parameters, amsgrad=True, **how),
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
}
WITHOUT_FUSED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "rmsprop": lambda parameters, **how: torch.optim.RMSprop(parameters, momentum=0.9, centered=True, **how),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
}


def parameters() -> list[Tensor]:
    return [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(()))]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, how) for name in OPTIMIZERS for how in ({"foreach": False}, {"foreach": True}, {"fused": True})),
        *((name, how) for name in WITHOUT_FUSED for how in ({"foreach": False}, {"foreach": True})),
    ],
    ids=str,
)
def test_elementwise_optimizers_are_accepted(name: str, how: dict[str, bool]) -> None:
    trained = parameters()
    optimizer = (OPTIMIZERS | WITHOUT_FUSED)[name](trained, **how)
    before = repr(optimizer.state_dict())
    called: list[str] = []
    optimizer.register_step_post_hook(lambda *_: called.append("hook"))
    require_elementwise(optimizer)
    (names,) = per_element(optimizer)
    assert not names & {"step", "mu", "eta", "mu_product"}
    assert repr(optimizer.state_dict()) == before
    assert [each.grad for each in trained] == [None] * 3
    assert all(torch.equal(each, torch.ones_like(each)) for each in trained)
    assert not called


def test_every_optimizer_of_torch_is_judged() -> None:
    """One that a later torch brings is to be looked at: does it need more than an element, and why?"""
    names = {
        name
        for name in dir(torch.optim)
        if isinstance(kind := getattr(torch.optim, name), type) and issubclass(kind, torch.optim.Optimizer)
    }
    names -= {"Optimizer", "Adafactor", "LBFGS", "Muon", "SparseAdam"}
    assert {name.lower() for name in names} == (OPTIMIZERS | WITHOUT_FUSED).keys()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.LBFGS, "it multiplies the gradients of all parameters"),
        (torch.optim.Adafactor, "it divides by norms of rows, columns and the whole"),
        (torch.optim.SparseAdam, "it takes sparse gradients alone"),
        (lambda trained: torch.optim.Muon([each for each in trained if each.dim() == 2]), "it makes each matrix"),
    ],
)
def test_those_of_torch_that_are_not_elementwise_are_refused_with_the_reason(
    make: Callable[..., torch.optim.Optimizer], reason: str
) -> None:
    optimizer = make(parameters())
    with pytest.raises(
        UserError, match=f"^{type(optimizer).__name__} does not treat each element by itself: {reason}"
    ) as refused:
        require_elementwise(optimizer)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


def test_each_parameter_group_is_tried_with_its_own_options() -> None:
    groups = [{"params": parameters()}, {"params": [nn.Parameter(torch.ones(5))], "weight_decay": 0.1, "amsgrad": True}]
    optimizer = torch.optim.AdamW(groups, foreach=True)
    require_elementwise(optimizer)
    first, second = per_element(optimizer)
    assert first == {"exp_avg", "exp_avg_sq"}
    assert second == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
