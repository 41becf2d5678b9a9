"""Which optimizers can be sharded, and that finding this out changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
}


class LayerWise(torch.optim.Optimizer):
    """Scales each update by the norms of its parameter and gradient, as LARS does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.norm() / parameter.grad.norm() * parameter.grad


class TwoDimensional(LayerWise):
    """Takes the mean of each row off."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                rows, _ = parameter.grad.shape
                parameter -= parameter.grad - parameter.grad.mean(1).view(rows, 1)


class OwnAttributes(LayerWise):
    """Elementwise, with attributes of its own and a state that is a plain number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.factor = 0.5

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                parameter -= self.factor / state["steps"] * parameter.grad


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
    names = per_element(optimizer, optimizer.param_groups[0])
    assert not names & {"step", "mu", "eta", "mu_product"}
    assert repr(optimizer.state_dict()) == before
    assert [each.grad for each in trained] == [None] * 3
    assert all(torch.equal(each, torch.ones_like(each)) for each in trained)
    assert not called


def test_an_optimizer_of_ones_own_is_accepted_with_its_attributes() -> None:
    require_elementwise(OwnAttributes(parameters()))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.LBFGS, r"LBFGS cannot update a parameter in pieces \(TypeError: .*closure"),
        (LayerWise, "LayerWise does not treat each element by itself"),
        (TwoDimensional, r"TwoDimensional cannot update a parameter in pieces \(ValueError: not enough values"),
        (torch.optim.Adafactor, "Adafactor does not treat each element by itself"),
        (torch.optim.SparseAdam, "SparseAdam cannot update a parameter in pieces"),
    ],
)
def test_others_are_refused_in_one_line(make: Callable[..., torch.optim.Optimizer], reason: str) -> None:
    with pytest.raises(UserError, match=reason) as refused:
        require_elementwise(make(parameters()))
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


def test_each_parameter_group_is_tried_with_its_own_options() -> None:
    groups = [{"params": parameters()}, {"params": [nn.Parameter(torch.ones(5))], "weight_decay": 0.1, "amsgrad": True}]
    optimizer = torch.optim.AdamW(groups, foreach=True)
    require_elementwise(optimizer)
    first, second = (per_element(optimizer, group) for group in optimizer.param_groups)
    assert first == {"exp_avg", "exp_avg_sq"}
    assert second == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
