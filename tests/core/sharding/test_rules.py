"""Rules of somebody's own, written to pass for elementwise: each is accepted or refused rightly, and left as it was."""

from __future__ import annotations

import copy
import random
from collections import UserList, deque
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.sharding.elementwise import per_element, require_elementwise


class Rule(torch.optim.Optimizer):
    """Updates each parameter by `change` of it, its gradient and its state."""

    def __init__(self, parameters: Any, lr: float = 0.01, **options: Any) -> None:
        super().__init__(parameters, {"lr": lr, **options})
        self.t = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.t += 1
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * self.change(parameter, parameter.grad, group, place))

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        return gradient


class Lamb(Rule):
    """Adam with a trust ratio."""

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        state = self.state[weight]
        mean = state.setdefault("mean", torch.zeros_like(weight))
        square = state.setdefault("square", torch.zeros_like(weight))
        mean.lerp_(gradient, 0.1)
        square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        update = mean / (square.sqrt() + 1e-8)
        return update * (weight.norm() / update.norm())


class Lars(Rule):
    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        return gradient * (0.001 * weight.norm() / (gradient.norm() + 1e-9))


class ByMatrixSize(Rule):
    """Normalises matrices of at least 32 x 32 alone: 11 x 500 of other trials has too few rows."""

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        is_large = weight.dim() == 2 and min(weight.shape) >= 32
        return gradient / gradient.norm() if is_large else gradient


class ByRate(Rule):
    """A rate for each layer by its number of elements."""

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        return gradient / weight.numel() ** 0.5


class ByPlace(Rule):
    """A rate for each layer by its place in the group."""

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        return gradient * 0.9**place


class ByNumber(Rule):
    """A rate by how many parameters there are."""

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        return gradient / len(group["params"])


class ClipEach(Rule):
    """Limits the norm of each parameter's gradient to 200."""

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        return gradient * (200 / (gradient.norm() + 1e-6)).clamp(max=1.0)


class LiftEach(Rule):
    """Makes gradients that have almost vanished larger."""

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        norm = gradient.norm()
        return gradient / norm if norm < 1e-3 else gradient


class ClipAll(Rule):
    """Limits the norm of all gradients together."""

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        every = [each.grad for each in group["params"] if each.grad is not None]
        return gradient / max(1.0, float(torch.nn.utils.get_total_norm(every)))


class LimitWeights(Rule):
    """Keeps the norm of weights below 500."""

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        return weight * (1 - (500 / weight.norm()).clamp(max=1.0)) / group["lr"] + gradient


class Spectral(Rule):
    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        matrix = gradient.view(gradient.shape[0], -1) if gradient.dim() > 1 else gradient.view(1, -1)
        return gradient / torch.linalg.matrix_norm(matrix, 2).clamp(min=1e-12)


class SignByMean(Rule):
    """A sign scaled by the mean of what it is the sign of."""

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        return gradient.sign() * gradient.abs().mean()


class Centralised(Rule):
    """Takes the mean of each row off, of matrices alone."""

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        return gradient - gradient.mean(1, keepdim=True) if gradient.dim() > 1 else gradient


class EveryTenth(Rule):
    """Elementwise but in every tenth step."""

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        return gradient / gradient.norm() if self.t % 10 == 0 else gradient


class DecayByDimensions(Rule):
    """Weight decay for matrices alone, told by their number of dimensions."""

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        return gradient + 0.1 * weight if weight.dim() > 1 else gradient


class ByAttribute(Rule):
    """Treats parameters that the model has marked in another way."""

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        return gradient * (2.0 if getattr(weight, "is_marked", False) else 1.0)


class DistanceOfAll(Rule):
    """Adapts a number of the group by all parameters, as D-Adaptation does, too late for the weights to show it."""

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        group["d"] = group.get("d", 0.0) + float((weight * gradient).sum())
        return gradient


class History(Rule):
    """Elementwise, with a state in lists and dicts, or in an object, of which a rank can keep no part."""

    def __init__(self, parameters: Any, container: Callable[[], Any] = list) -> None:
        super().__init__(parameters)
        self.container = container

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        past = self.state[weight].setdefault("past", {"newest": self.container(), "name": "past"})
        past["newest"].append(gradient.clone())
        return past["newest"][max(0, len(past["newest"]) - 3)]


class ByAnotherCopy(Rule):
    """Updates what it has remembered of the parameters beside its groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.mine = [each for group in self.param_groups for each in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.mine:
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad


class Langevin(Rule):
    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        return gradient + 0.1 * torch.randn_like(gradient)


class PythonDraws(Rule):
    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        return gradient * random.random()


class NumpyDraws(Rule):
    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        return gradient * float(np.random.rand())


class OwnGenerator(Rule):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.generator = torch.Generator().manual_seed(3)

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        return gradient + torch.randn(gradient.shape, generator=self.generator)


class Idle(Rule):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.t += 1


class Counter(Rule):
    """Elementwise, with a bias correction by an attribute that counts steps."""

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
        mean.lerp_(gradient, 0.1)
        return mean / (1 - 0.9**self.t)


class PlainNumbers(Rule):
    """Elementwise, with a state that is a plain number."""

    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        state = self.state[weight]
        state["steps"] = state.get("steps", 0) + 1
        return gradient / state["steps"]


class ClipElements(Rule):
    def change(self, weight: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> Tensor:
        return gradient.clamp(-0.5, 0.5) + weight.sign() * (weight.abs() > 50)


class GroupCounter(Rule):
    """Elementwise, and counts in its group and in a tensor of its own, which the trial must not change."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, steps=0)
        self.seen = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.seen += 1
        for group in self.param_groups:
            group["steps"] += 1
        super().step()


class Wrapper(torch.optim.Optimizer):
    """Elementwise: steps another optimizer, whose groups and state are its own, too."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        super().__init__(inside.param_groups, {})
        self.inside = inside
        self.param_groups, self.state = inside.param_groups, inside.state

    def step(self, closure: Any = None) -> None:
        self.inside.step()


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes: Sequence[tuple[int, ...]] = [(48, 64), (48,), (8, 3, 5, 5), (1,)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


REFUSED: dict[str, type[Rule]] = {
    each.__name__: each
    for each in (
        *(Lamb, Lars, ByMatrixSize, ByRate, ByPlace, ByNumber, ClipEach, LiftEach, ClipAll, LimitWeights, Spectral),
        *(SignByMean, Centralised, EveryTenth, DecayByDimensions, DistanceOfAll, ByAnotherCopy),
    )
}
DRAWING = [Langevin, PythonDraws, NumpyDraws, OwnGenerator]
ACCEPTED: list[Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = [
    *(Rule, Counter, PlainNumbers, ClipElements, GroupCounter),
    lambda trained: Wrapper(torch.optim.AdamW(trained, lr=0.01)),
]


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_a_rule_that_needs_more_than_an_element_is_refused(make: type[Rule]) -> None:
    with pytest.raises(
        UserError, match=f"^{make.__name__} does not treat each element by itself: in pieces"
    ) as refused:
        require_elementwise(make(parameters()))
    assert refused.value.exit_code == 2
    assert "--shard none" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("make", [Lamb, Lars, ClipEach, Counter, torch.optim.AdamW])
def test_a_rate_that_a_warm_up_has_set_to_0_hides_nothing(make: Callable[..., torch.optim.Optimizer]) -> None:
    optimizer = make(parameters(), lr=0.01)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    assert optimizer.param_groups[0]["lr"] == 0.0
    if make in (Counter, torch.optim.AdamW):
        require_elementwise(optimizer)
    else:
        with pytest.raises(UserError, match="does not treat each element by itself"):
            require_elementwise(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.0


def test_the_place_of_a_parameter_counts_though_all_have_one_shape() -> None:
    with pytest.raises(UserError, match="ByPlace does not treat each element by itself"):
        require_elementwise(ByPlace([nn.Parameter(torch.ones(4, 4)) for _ in range(5)]))


def test_attributes_of_a_parameter_count_as_its_pieces_have_none() -> None:
    trained = parameters()
    require_elementwise(ByAttribute(trained))
    trained[0].is_marked = True  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="ByAttribute does not treat each element by itself"):
        require_elementwise(ByAttribute(trained))


@pytest.mark.parametrize("make", DRAWING)
def test_a_rule_that_draws_random_numbers_is_refused_as_such(make: type[Rule]) -> None:
    before = (random.getstate(), repr(np.random.get_state()), torch.random.get_rng_state())
    with pytest.raises(UserError, match=f"^{make.__name__} draws random numbers in its step"):
        require_elementwise(make(parameters()))
    after = (random.getstate(), repr(np.random.get_state()), torch.random.get_rng_state())
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_containers_of_a_state_are_cut_and_objects_are_refused_as_such() -> None:
    for container in (list, partial(deque, maxlen=3)):
        require_elementwise(History(parameters(), container))
    with pytest.raises(
        UserError, match=r"History keeps past\.newest of a weight as a UserList, of which no rank can keep its part"
    ):
        require_elementwise(History(parameters(), UserList))


def test_a_step_in_the_place_of_the_method_is_what_is_tried() -> None:
    def scaled(self: Any, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad / parameter.grad.norm())

    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    optimizer.step = MethodType(scaled, optimizer)  # type: ignore[method-assign]
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(UserError, match="SGD does not treat each element by itself"):
        require_elementwise(optimizer)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"SGD cannot be tried: .*its step is a function"):
        require_elementwise(optimizer)


def test_a_rule_that_changes_nothing_cannot_be_tried() -> None:
    with pytest.raises(UserError, match="Idle cannot be tried: 30 steps of a copy of it changed no weight"):
        require_elementwise(Idle(parameters()))


@pytest.mark.parametrize("make", ACCEPTED)
def test_an_elementwise_rule_is_accepted_and_left_as_it_was(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    trained = parameters()
    optimizer = make(trained)
    values, before = copy.deepcopy(trained), repr(optimizer.state_dict())
    own = {name: repr(value) for name, value in vars(optimizer).items()}
    require_elementwise(optimizer)
    per_element(optimizer)
    assert repr(optimizer.state_dict()) == before
    assert {name: repr(value) for name, value in vars(optimizer).items()} == own
    assert all(torch.equal(one, other) for one, other in zip(trained, values, strict=True))
    assert all(each.grad is None for each in trained)


def test_parameters_beyond_what_is_tried_in_real_size_are_cropped() -> None:
    """In a second, whatever their number; and a rule shows in the cropped ones, too."""
    large = [nn.Parameter(torch.empty(4096, 2048)), nn.Parameter(torch.empty(2048, 4096))]
    require_elementwise(torch.optim.AdamW(large, fused=True))
    with pytest.raises(UserError, match="ByMatrixSize does not treat each element by itself"):
        require_elementwise(ByMatrixSize(large))
