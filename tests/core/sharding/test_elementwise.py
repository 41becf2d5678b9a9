"""Which optimizers can be sharded, and that finding this out changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.sharding.elementwise import of_every_item, per_element, require_elementwise, same_values

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


def test_what_some_dtypes_alone_have_is_known() -> None:
    """As the compensation that optimizers keep for weights in bfloat16."""

    class Compensated(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for each in group["params"]:
                    if each.dtype == torch.bfloat16:
                        self.state[each]["compensation"] = torch.zeros_like(each)

    names = [
        per_element(Compensated([nn.Parameter(torch.ones(2, dtype=dtype))]))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert names == [[set()], [{"compensation"}]]


def test_the_state_of_a_single_number_does_not_stand_for_that_of_others() -> None:
    number, matrix = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(3, 4))
    optimizer = torch.optim.Adam([number, matrix])
    number.grad = torch.ones(())
    optimizer.step()
    assert per_element(optimizer) == [{"exp_avg", "exp_avg_sq"}]


def test_items_of_a_sequence_have_one_name() -> None:
    class Growing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for each in self.param_groups[0]["params"]:
                past = self.state[each].setdefault("past_2", [{1: torch.zeros_like(each)}])
                past.append({1: torch.zeros_like(each)})

    assert per_element(Growing([nn.Parameter(torch.ones(3))])) == [{of_every_item("past_2.17.1")}]
    assert of_every_item("past_2.17.1") == of_every_item("past_2.0.1") != of_every_item("past_3.0.1")


ONE = torch.tensor([0.0, math.nan])
SAME: list[tuple[Any, Any]] = [
    (math.nan, math.nan),
    (ONE, ONE.clone()),
    (nn.Parameter(ONE), ONE),
    (ONE, nn.Parameter(ONE)),
    ({"a": ONE, "b": 2}, {"b": 2, "a": ONE.clone()}),
    ([1, (ONE, "text")], [1, (ONE.clone(), "text")]),
    ({}, {}),
    (torch.float32, torch.float32),
    (object(), object()),
]
UNLIKE: list[tuple[Any, Any]] = [
    (0.0, -0.0),
    (1, True),
    (1, 1.0),
    (None, 0),
    (ONE, -ONE),
    (ONE, ONE.double()),
    (ONE, ONE[:1]),
    (nn.Parameter(ONE), -ONE),
    (ONE, 0.0),
    (0.0, ONE),
    ({"a": 1}, {"a": 2}),
    ({"a": 1}, {"a": 1, "b": 1}),
    ({"a": 1, "b": 1}, {"a": 1}),
    ({"a": 1}, {"b": 1}),
    ([1, 2], [1, 3]),
    ([1, 2], [1]),
    ([1], (1,)),
    ("text", "Text"),
    (torch.float32, torch.float64),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_values_of_the_same_bits_are_the_same(one: Any, other: Any) -> None:
    assert same_values(one, other)


@pytest.mark.parametrize(("one", "other"), UNLIKE)
def test_values_that_differ_in_a_bit_or_in_their_kind_are_not_the_same(one: Any, other: Any) -> None:
    assert not same_values(one, other)
