"""The copy of an optimizer with which it is tried: it does what the optimizer would, and touches nothing of it."""

from __future__ import annotations

import random
from collections import deque
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_core.base.user_code import users
from ddp_core.sharding.trial import Trial


class Rule(torch.optim.Optimizer):
    """Has references to itself, its groups and its parameters, and a state that belongs to no parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5, "of_group": [0]})
        self.first, self.groups, self.everyone = self.param_groups[0]["params"][0], self.param_groups, [self]
        self.my_hooks = {"count": 0}
        self._optimizer_kind = "rule"
        self.state["all"] = {"count": 0, "first": self.first}  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert self.groups is self.param_groups
        assert self.everyone == [self]
        assert self._optimizer_kind == "rule"
        self.state["all"]["count"] += 1  # type: ignore[index]
        self.state["all"]["first"].add_(0)  # type: ignore[index]
        self.my_hooks["count"] += 1
        self.first.add_(100)
        for group in self.param_groups:
            group["of_group"].append(self.state["all"]["count"])  # type: ignore[index]
            for each in group["params"]:
                state = self.state[each]
                state.setdefault("sum", torch.zeros_like(each)).add_(each.grad)
                state.setdefault("steps", torch.zeros(())).add_(1)
                state.setdefault("past", deque(maxlen=2)).append(each.grad.clone())
                each.sub_(group["lr"] * state["sum"])


def trial_of(optimizer: torch.optim.Optimizer, *shapes: tuple[int, ...]) -> tuple[Trial, list[nn.Parameter]]:
    """A copy with one group of zeros of these shapes, each like the parameter of the same number."""
    every = [each for group in optimizer.param_groups for each in group["params"]]
    new = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    of = {id(one): like for one, like in zip(new, every, strict=True)}
    trial = Trial(optimizer, [new], dict(zip(map(id, every), new, strict=True)), of)
    for each in new:
        each.grad = torch.ones_like(each)
    return trial, new


def stepped() -> tuple[Rule, list[nn.Parameter]]:
    """A rule that has made one step; its parameters are a matrix and a number."""
    parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(()))]
    rule = Rule(parameters)
    for number, each in enumerate(parameters, start=2):
        each.grad = torch.full_like(each, number)
    rule.step()
    return rule, parameters


def test_a_copy_changes_its_own_values_alone() -> None:
    rule, parameters = stepped()
    rule.param_groups[0]["anchor"] = rule.first
    rule.state[rule.first]["rule"] = rule
    before = [repr(each) for each in (rule.state_dict(), rule.my_hooks, rule.state["all"], *parameters)]  # type: ignore[index]
    trial, new = trial_of(rule, (4, 5), ())
    trial.step()
    trial.step()
    assert [repr(each) for each in (rule.state_dict(), rule.my_hooks, rule.state["all"], *parameters)] == before  # type: ignore[index]
    copied: Any = trial.optimizer
    assert type(copied) is Rule
    assert copied.first is copied.state["all"]["first"] is new[0]
    assert trial.groups[0]["anchor"] is new[0]
    assert copied.state[new[0]]["rule"] is copied
    assert copied.my_hooks == {"count": 3}
    assert copied.state["all"]["count"] == 3
    assert trial.groups == copied.param_groups
    assert trial.groups[0]["params"] == new
    assert trial.groups[0]["of_group"] == [0, 1, 2, 3]
    assert not trial.state_of(new[0])["sum"].requires_grad


def test_a_new_parameter_begins_with_the_state_of_the_one_it_is_like() -> None:
    rule, _ = stepped()
    trial, new = trial_of(rule, (4, 5), ())
    assert rule.state[rule.first]["sum"].tolist() == [[2.0] * 3] * 2
    state = trial.state_of(new[0])
    assert list(state) == ["sum", "steps", "past.items of a deque.0", "past.maxlen"]
    assert torch.equal(state["sum"], torch.full((4, 5), 2.0))
    assert state["steps"].shape == ()
    assert trial.state_of(new[1])["sum"].tolist() == 3.0
    trial.step()
    assert torch.equal(trial.state_of(new[0])["sum"], torch.full((4, 5), 3.0))
    assert trial.state_of(new[0])["steps"] == 2
    # The first parameter is remembered beside the groups, too, and each of both is the same one.
    assert torch.equal(new[0], torch.full((4, 5), 100 - 0.5 * 3.0))


def test_a_single_number_is_not_cut_because_it_has_the_shape_of_its_parameter() -> None:
    """It has all shapes of a parameter without dimensions: of a vector that stands for one, it stays a number."""
    rule, _ = stepped()
    trial, new = trial_of(rule, (4, 5), (1,))
    assert trial.state_of(new[1])["steps"].shape == ()
    assert trial.state_of(new[1])["sum"].shape == (1,)


def test_a_state_without_elements_has_nothing_to_begin_with() -> None:
    empty = nn.Parameter(torch.zeros(0, 3))
    optimizer = torch.optim.Adagrad([empty], initial_accumulator_value=0.1)
    trial, new = trial_of(optimizer, (0, 3))
    assert trial.state_of(new[0])["sum"].shape == (0, 3)
    assert trial.state_of(nn.Parameter(empty.detach())) == {}


def test_hooks_of_the_optimizer_are_not_called() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    optimizer.register_state_dict_pre_hook(lambda *_: called.append("state"))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trial, new = trial_of(optimizer, (3,))
    of_all = register_optimizer_step_pre_hook(lambda *_: called.append("of all"))
    try:
        trial.step()
    finally:
        of_all.remove()
    trial.optimizer.state_dict()
    trial.optimizer.register_step_pre_hook(lambda *_: called.append("mine"))
    assert new[0].tolist() == [-0.5] * 3
    assert called == []
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert called == ["before", "after"]


def test_the_step_is_the_one_that_would_be_called() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.5)

    def rise(self: Any, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            each += 1

    optimizer.step = MethodType(rise, optimizer)  # type: ignore[method-assign]
    trial, (new,) = trial_of(optimizer, (2,))
    trial.step()
    assert new.tolist() == [1.0, 1.0]
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="its step is a function in the place of the method"):
        trial_of(optimizer, (2,))


def test_an_error_in_the_step_is_the_users() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.5)

    def fail(self: Any, closure: Any = None) -> None:
        raise LookupError

    optimizer.step = MethodType(fail, optimizer)  # type: ignore[method-assign]
    trial, _ = trial_of(optimizer, (2,))
    with pytest.raises(LookupError) as raised:
        trial.step()
    assert users(raised.value) == "your optimizer"


GENERATORS = [random.Random(1), np.random.default_rng(1), np.random.RandomState(1), torch.Generator().manual_seed(1)]


@pytest.mark.parametrize("place", ["attribute", "group"])
@pytest.mark.parametrize("generator", GENERATORS, ids=lambda each: f"{type(each).__module__}.{type(each).__name__}")
def test_a_draw_from_a_generator_of_the_copy_is_seen(generator: Any, place: str) -> None:
    optimizer: Any = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.5)
    if place == "attribute":
        optimizer.mine = generator
    else:
        optimizer.param_groups[0]["mine"] = generator
    trial, _ = trial_of(optimizer, (2,))
    own: Any = trial.groups[0]["mine"] if place == "group" else vars(trial.optimizer)["mine"]
    before = trial.drawn_from()
    assert trial.drawn_from() == before
    if isinstance(own, torch.Generator):
        torch.rand((), generator=own)
    else:
        own.random()
    assert trial.drawn_from() != before


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: torch.rand(())])
def test_a_draw_from_a_generator_of_all_is_seen(draw: Any) -> None:
    trial, _ = trial_of(torch.optim.SGD([nn.Parameter(torch.zeros(2))]), (2,))
    before = trial.drawn_from()
    draw()
    assert trial.drawn_from() != before


def test_what_cannot_be_copied_is_used_itself() -> None:
    optimizer: Any = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
    optimizer.mine = (each for each in ())
    trial, _ = trial_of(optimizer, (2,))
    assert vars(trial.optimizer)["mine"] is optimizer.mine


def test_tensors_of_a_state_keep_their_dtype() -> None:
    like = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([like])
    optimizer.state[like]["seen"] = torch.ones(2, dtype=torch.int64)
    trial, (new,) = trial_of(optimizer, (3,))
    seen: Tensor = trial.state_of(new)["seen"]
    assert (seen.dtype, seen.tolist()) == (torch.int64, [1, 1, 1])
