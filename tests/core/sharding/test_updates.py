"""The state of an optimizer whose parameters are cut among ranks (threads here): cut as it comes, whole as it goes."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.checkpoint import CutTensor, whole_tensors
from ddp_core.checkpoint.state import leaves, load_optimizer, replaced, without_queues
from ddp_core.sharding.owned import Owned
from ddp_core.sharding.updates import OwnUpdates
from tests.distributed.exact_cases import described
from tests.support.thread_group import on_threads, use_threads

RANKS = 3
CUTS = {"long": [1024, 2048, 3000], "image": [0, 95, 96], "number": [0, 0, 1], "none": [0, 0, 0]}
"""Where each rank's elements of each parameter end (of fewer ranks: the last ones'); `whole` is cut nowhere."""


class Kept(torch.optim.Optimizer):
    """Keeps all kinds of values: tensors like the parameter, in containers, too, counts, a text, and one of its own."""

    def __init__(self, groups: Any, unlike: str = "") -> None:
        super().__init__(groups, {"lr": 0.1})
        self.unlike = unlike

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["all"] = self.state.get("all", 0) + 1  # type: ignore[index]
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                if not state:
                    state |= {"mean": torch.zeros_like(each), "steps": torch.zeros(()), "past": deque(maxlen=2)}
                    state |= {"is_empty": not each.numel(), "inner": [{"square": torch.zeros_like(each)}, "plain"]}
                state["steps"] += 1
                state["mean"].lerp_(each.grad, 0.1)
                state["past"].append(each.grad.clone())
                state["inner"][0]["square"] += each.grad**2
                each -= 0.1 * state["mean"]
                if self.unlike == "value":
                    state[7] = float(each.sum())
                if self.unlike == "whole" and each.numel() == 5:
                    state["mine"] = id(self)
                if self.unlike == "missing" and each.numel() == 1024:
                    state["is_large"] = True


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"long": (3000,), "image": (8, 3, 2, 2), "whole": (5,), "number": (), "none": (0, 3)}
    found = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    found["image"].data = found["image"].data.contiguous(memory_format=torch.channels_last)
    return found


def groups(tensors: dict[str, Any]) -> list[dict[str, Any]]:
    """In another sequence than that of the names, which nobody may rely on."""
    return [{"params": [tensors[name] for name in names]} for names in (("number", "long"), ("none", "whole", "image"))]


def memory_of(values: Tensor) -> Tensor:
    """In one dimension, in the sequence of the memory."""
    return values.permute(0, 2, 3, 1).reshape(-1) if values.dim() == 4 else values.reshape(-1)


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(each.shape, generator=generator).to(each.device) for name, each in parameters().items()}


def state_after(steps: int) -> dict[str, Any]:
    """The state of an optimizer of whole parameters in one process."""
    whole = parameters()
    optimizer = Kept(groups(whole))
    for step in range(steps):
        for name, gradient in gradients(step).items():
            whole[name].grad = gradient.contiguous(memory_format=torch.channels_last) if name == "image" else gradient
        optimizer.step()
    return optimizer.state_dict()


class Rank:
    """One rank's parts of the parameters, and what updates them; it begins with `state`.

    `has_empty`: also a tensor in the place of a parameter of which it has no element, as where rows are cut.
    """

    def __init__(
        self, group: Any, state: dict[str, Any] | None = None, unlike: str = "", has_empty: bool = False
    ) -> None:
        (rank, size), whole = (group.rank(), group.size()) if group is not None else (0, 1), parameters()
        self.optimizer = Kept(groups(whole), unlike)
        if state is not None:
            load_optimizer(self.optimizer, copy.deepcopy(state))
        self.owned: dict[str, Owned] = {}
        for name, cuts in CUTS.items():
            start, stop = [0, *cuts[-size:]][rank : rank + 2]
            has_part = has_empty or start < stop or (name == "none" and rank == 0)
            tensor = nn.Parameter(memory_of(whole[name].detach())[start:stop].clone()) if has_part else None
            if name == "number":  # which is never cut between rows
                tensor = nn.Parameter(whole[name].detach().clone()) if start < stop else None
            self.owned[name] = Owned(name, whole[name], start, stop, tensor)
        self.whole = whole["whole"]
        self.updates = OwnUpdates(self.optimizer, {id(whole[name]): own for name, own in self.owned.items()}, group)

    def step(self, step: int) -> None:
        every = gradients(step)
        self.whole.grad = every["whole"]
        for name, own in self.owned.items():
            if own.tensor is not None:
                own.tensor.grad = memory_of(every[name])[own.start : own.stop].view(own.tensor.shape)
        self.optimizer.step()


def together(states: Sequence[dict[str, Any]]) -> str:
    """The whole state of which these ranks have parts, as a text; all of them know of the same entries."""
    every = [leaves(state) for state in states]
    assert len({tuple(each) for each in every}) == 1

    def whole(leaf: Any, name: str) -> Any:
        if not isinstance(leaf, CutTensor):
            assert len({described(each[name]) for each in every}) == 1
            return leaf
        pieces = [piece for each in every for piece in each[name].pieces.items()]
        assert sum(values.numel() for _, values in pieces) == math.prod(leaf.shape)
        return CutTensor(leaf.dtype, leaf.shape, leaf.strides, dict(pieces))

    return in_order(whole_tensors(replaced(states[0], whole)))


def in_order(state: dict[str, Any]) -> str:
    """A whole state, as it is saved, as a text."""
    state = without_queues(state)
    return described(state | {"state": dict(sorted(state["state"].items(), key=str))})


@pytest.fixture(autouse=True)
def on_groups_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)


@pytest.mark.parametrize("has_empty", [False, True])
def test_a_state_is_cut_goes_on_and_is_whole_again(has_empty: bool) -> None:
    def train(group: Any) -> list[dict[str, Any]]:
        rank = Rank(group, state_after(2), has_empty=has_empty)
        found = [copy.deepcopy(rank.updates.own_state())]
        rank.step(2)
        rank.step(3)
        found.append(copy.deepcopy(rank.updates.own_state()))
        rank.updates.load_whole_state(state_after(1))
        found.append(rank.updates.own_state())
        return found

    expected = [in_order(state_after(steps)) for steps in (2, 4, 1)]
    assert [together(states) for states in zip(*on_threads(RANKS, train), strict=True)] == expected
    assert [together([state]) for state in train(None)] == expected


def test_each_rank_keeps_the_state_of_its_part_alone_in_memory_of_its_own() -> None:
    state = state_after(3)
    before = in_order(state)
    for rank in on_threads(RANKS, lambda group: Rank(group)):
        rank.updates.load_whole_state(state)
        for tensor, kept in rank.optimizer.state.items():
            for name, value in leaves(kept).items():
                if isinstance(value, Tensor) and isinstance(tensor, Tensor):
                    assert value.shape in (tensor.shape, ()), name
                    assert value.untyped_storage().nbytes() == value.nbytes, name
                    value.add_(1)
    assert in_order(state) == before


def test_what_is_not_cut_is_saved_as_a_copy() -> None:
    rank = Rank(None, state_after(1))
    rank.updates.own_state()["state"][3]["mean"].add_(1)
    assert together([rank.updates.own_state()]) == in_order(state_after(1))


def test_a_state_that_lies_in_parts_is_read_where_it_is_owned() -> None:
    """As from a checkpoint, in which each tensor lies in the pieces of another number of ranks."""
    saved = on_threads(RANKS, lambda group: Rank(group, state_after(2)).updates.own_state())
    every = [leaves(state) for state in saved]

    def in_parts(leaf: Any, name: str) -> Any:
        if isinstance(leaf, Tensor) and leaf.shape == (5,):  # whole here, and cut by those who saved it
            return CutTensor(leaf.dtype, (5,), (1,), {0: leaf[:2], 2: leaf[2:]})
        if not isinstance(leaf, CutTensor):
            return leaf
        pieces = {start: values for each in every for start, values in each[name].pieces.items()}
        return CutTensor(leaf.dtype, leaf.shape, leaf.strides, pieces)

    state = replaced(saved[0], in_parts)

    def load(group: Any) -> dict[str, Any]:
        rank = Rank(group)
        rank.updates.load_whole_state(state)
        return rank.updates.own_state()

    assert together(on_threads(2, load)) == in_order(state_after(2))
    assert together([load(None)]) == in_order(state_after(2))


@pytest.mark.parametrize(
    ("unlike", "entry"),
    [
        ("value", "7 of a weight of shape [3000]"),
        ("missing", "is_large of a weight of shape [3000]"),
        ("whole", "mine of a weight of shape [5]"),
    ],
)
def test_a_value_that_is_another_on_each_rank_is_refused_on_all(unlike: str, entry: str) -> None:
    def refusal(group: Any) -> str:
        rank = Rank(group, unlike=unlike)
        rank.step(0)
        with pytest.raises(UserError) as refused:
            rank.updates.own_state()
        assert refused.value.exit_code == 2
        return str(refused.value)

    for said in on_threads(RANKS, refusal):
        assert said.startswith(f"Kept does not treat each element by itself: {entry} is another ")


def test_ranks_whose_groups_are_in_another_sequence_are_refused_on_all() -> None:
    """As groups that are made from sets of parameters, which every process has in a sequence of its own."""

    def refusal(group: Any) -> str:
        whole = parameters()
        names = ("long", "image") if group.rank() < 2 else ("image", "long")
        owned = {id(whole[name]): Owned(name, whole[name], 0, 0, None) for name in names}
        with pytest.raises(UserError, match=r"^rank 2 has the parameters of its optimizer's groups in"):
            OwnUpdates(torch.optim.SGD([whole[name] for name in names]), owned, group)
        return "refused"

    assert on_threads(RANKS, refusal) == ["refused"] * RANKS


def test_a_state_of_other_groups_is_refused_with_their_sizes() -> None:
    rank = Rank(None)
    state = state_after(1)
    state["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match=r"has \[1, 3\] parameters in its groups, but the optimizer has \[2, 3\]"):
        rank.updates.load_whole_state(state)
