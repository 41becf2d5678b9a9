"""What a trial of an optimizer looks at: rates, states, groups, rows, errors; each rule here shows in one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.reduction.norm import BLOCK
from ddp_core.sharding.elementwise import require_elementwise
from tests.core.sharding.test_rules import Rule


def small(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes or [(5, 7)]]


class Rates(Rule):
    """Notes the rates with which it is tried."""

    seen: set[Any]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        Rates.seen |= {(place, repr(group.get("lr"))) for place, group in enumerate(self.param_groups)}
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(0.01 * each.grad)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([{"lr": 0.0}], {"0.01"}),
        ([{"lr": 0}], {"0.01"}),
        ([{"lr": 0.5}], {"0.5"}),
        ([{"lr": 0.001, "initial_lr": 0.25}], {"0.25"}),
        ([{"lr": 0.5, "initial_lr": 0.25}], {"0.5"}),
        ([{"lr": torch.tensor([0.0])}], {"tensor([0.0100])"}),
        ([{"lr": torch.tensor(0.5, dtype=torch.float64)}], {"tensor(0.5000, dtype=torch.float64)"}),
        ([{"lr": False}], {"False"}),
        ([{"lr": "slow"}], {"'slow'"}),
        ([{"lr": None}], {"None"}),
    ],
    ids=str,
)
def test_each_rate_is_raised_above_0_and_no_further(groups: list[dict[str, Any]], expected: set[str]) -> None:
    Rates.seen = set()
    require_elementwise(Rates([{"params": small(), **group} for group in groups]))
    assert {rate for _, rate in Rates.seen} == expected


def test_a_group_whose_rate_is_0_is_tried_with_that_of_others_and_with_one_that_shows() -> None:
    Rates.seen = set()
    require_elementwise(Rates([{"params": small(), "lr": 0.0}, {"params": small(), "lr": 0.003}]))
    assert {rate for place, rate in Rates.seen if place == 0} == {"0.003", "0.01"}
    assert {rate for place, rate in Rates.seen if place == 1} == {"0.003", "0.01"}


class Keeping(Rule):
    """Elementwise in its weights; `keep` notes something that no update needs."""

    def __init__(self, parameters: Any, keep: Callable[[Rule, Tensor, dict[str, Any]], None]) -> None:
        super().__init__(parameters)
        self.keep = keep

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        self.keep(self, weight, group)
        return gradient


def largest(rule: Rule, weight: Tensor, group: dict[str, Any]) -> None:
    assert weight.grad is not None
    if weight.numel():
        rule.state[weight]["largest"] = float(weight.grad.abs().max())


def of_matrices(rule: Rule, weight: Tensor, group: dict[str, Any]) -> None:
    if weight.dim() > 1:
        rule.state[weight]["rows"] = torch.zeros(3)


def of_vectors(rule: Rule, weight: Tensor, group: dict[str, Any]) -> None:
    if weight.dim() == 1:
        rule.state[weight]["rows"] = torch.zeros(3)


def of_matrices_in_the_group(rule: Rule, weight: Tensor, group: dict[str, Any]) -> None:
    if weight.dim() > 1:
        group["has_rows"] = True


def of_vectors_in_the_group(rule: Rule, weight: Tensor, group: dict[str, Any]) -> None:
    if weight.dim() == 1:
        group["has_rows"] = True


@pytest.mark.parametrize(
    ("keep", "what"),
    [
        (largest, r"largest of a weight of shape \[5, 7\] is another"),
        (of_matrices, r"rows of a weight of shape \[5, 7\] is another"),
        (of_vectors, r"rows of a weight of shape \[5, 7\] is another"),
        (of_matrices_in_the_group, r"has_rows of parameter group 0 is another"),
        (of_vectors_in_the_group, r"has_rows of parameter group 0 is another"),
    ],
)
def test_a_state_that_is_another_in_pieces_is_named_though_the_weights_are_the_same(
    keep: Callable[[Rule, Tensor, dict[str, Any]], None], what: str
) -> None:
    with pytest.raises(UserError, match=f"Keeping does not treat each element by itself: in pieces {what}, in step 1 "):
        require_elementwise(Keeping(small(), keep))


def plain(rule: Rule, weight: Tensor, group: dict[str, Any]) -> None:
    rule.state[weight] |= {"a": True, "b": 1, "c": 1.5, "d": 1j, "e": "text", "f": b"text", "g": torch.float32}
    rule.state[weight] |= {"h": torch.device("cpu"), "i": None, "j": [{"k": (1, "text")}]}


def test_plain_values_of_all_kinds_may_be_kept() -> None:
    require_elementwise(Keeping(small(), plain))


class Diffused(Rule):
    """Adds to each element its left neighbour in blocks of 1024, as what spreads rounding errors does.

    Pieces begin where blocks do, and the first rank's rows, too: it shows in the other rank's rows alone.
    """

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        flat = gradient.reshape(-1)
        left = torch.cat([flat.new_zeros(1), flat[:-1]])[: len(flat)]
        left[::BLOCK] = 0
        return gradient + left.view(gradient.shape)


def test_every_rank_is_tried_also_behind_a_parameter_of_which_it_has_nothing() -> None:
    require_elementwise(Diffused(small((1,), (2, BLOCK))))
    with pytest.raises(
        UserError, match=r"Diffused does not treat .*: in pieces a weight of shape \[3, 999\] has other"
    ):
        require_elementwise(Diffused(small((1,), (3, 999))))


class TenthStep(Rule):
    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        return gradient / gradient.norm() if self.t == 10 else gradient


def test_the_step_is_told_in_which_it_showed() -> None:
    with pytest.raises(UserError, match=r"in step 10 of a trial with gradients of about 1;"):
        require_elementwise(TenthStep(small()))


class Failing(Rule):
    """Fails for all, or for vectors, as pieces are."""

    def __init__(self, parameters: Any, dimensions: int) -> None:
        super().__init__(parameters)
        self.dimensions = dimensions

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        if weight.dim() == self.dimensions:
            raise LookupError("on\n purpose")
        return gradient


@pytest.mark.parametrize(("dimensions", "how"), [(2, "in a trial"), (1, "in pieces")])
def test_a_rule_that_fails_is_refused_with_its_error_in_a_line(dimensions: int, how: str) -> None:
    with pytest.raises(UserError, match=rf"^Failing cannot update a parameter {how} \(LookupError: on purpose\); "):
        require_elementwise(Failing(small(), dimensions))


class Gathering(Rule):
    """Updates weights in every hundredth step only."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.t += 1
        for each in self.param_groups[0]["params"]:
            total = self.state[each].setdefault("total", torch.zeros_like(each)).add_(each.grad)
            if self.t % 100 == 0:
                each.sub_(0.01 * total)


def test_a_rule_that_gathers_before_it_updates_is_accepted() -> None:
    require_elementwise(Gathering(small((5, 7), (3,), (0, 4))))


def test_an_object_in_a_state_is_refused_as_such() -> None:
    rule = Keeping(small(), lambda rule, weight, _: rule.state[weight].update(past=[1, slice(1)]))
    with pytest.raises(UserError, match=r"Keeping keeps past\.1 of a weight as a slice, of which no rank can keep"):
        require_elementwise(rule)
