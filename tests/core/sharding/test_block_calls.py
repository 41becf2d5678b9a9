"""Passes that come to other blocks are refused before a gather would pair unlike ones; ranks are threads here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.sharding.blocks import BlockCalls
from tests.support.thread_group import on_threads, use_threads


class Net(nn.Module):
    """Calls the layers that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, rows: Tensor, calls: list[int]) -> Tensor:
        for call in calls:
            rows = self.layers[call](rows)
        return rows


def told(net: Net, calls: list[int]) -> str:
    try:
        net(torch.ones(1, 2), calls)
    except UserError as error:
        kind = "forward" if net.training else "forward in evaluation"
        return str(error).partition(f"its {kind} comes to ")[2].partition(" in another")[0]
    return ""


@pytest.fixture(autouse=True)
def on_groups_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)


def test_each_later_forward_repeats_the_first_one_of_its_mode() -> None:
    def messages(group: Any) -> list[str]:
        net = Net()
        BlockCalls(net, list(net.layers), group)
        net.layers[2](torch.ones(1, 2))  # a backward may call blocks again, outside of a forward
        found = [told(net, [0, 1]), told(net, [0, 1])]
        net.layers[2](torch.ones(1, 2))
        found += [told(net, [0, 2]), told(net, [0]), told(net, [0, 1, 1]), told(net, [0, 1])]
        net.eval()
        found += [told(net, [2]), told(net, [2]), told(net, [0])]
        net.train()
        return [*found, told(net, [0, 1]), told(net, [1, 0])]

    mixed, short, long = "layers.1 and layers.2", "its end and layers.1", "its end and layers.1"
    expected = ["", "", mixed, short, long, "", "", "", "layers.0 and layers.2", "", "layers.0 and layers.1"]
    assert on_threads(2, messages) == [expected] * 2


def test_in_the_first_forward_ranks_are_compared_before_each_gather() -> None:
    """What gathers is a hook, too, and is there first."""

    def gathered(group: Any) -> tuple[str, list[int]]:
        net, found = Net(), list[int]()
        for number, layer in enumerate(net.layers):
            layer.register_forward_pre_hook(lambda *_, number=number: found.append(number))
        BlockCalls(net, list(net.layers), group)
        return told(net, [0, 1, 2] if group.rank() else [0, 1]), found

    assert on_threads(3, gathered) == [("its end and layers.2", [0, 1])] * 3


class Branches(Net):
    """Calls all layers, and makes its output of those that it is told, and of its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(()))

    def forward(self, rows: Tensor, used: list[int]) -> Any:
        outputs = [layer(rows) for layer in self.layers]
        return {"some": [outputs[number].sum() for number in used], "own": self.own * 2.0}, "no tensor"


def told_by_backward(net: Net, used: list[int]) -> str:
    outputs, _ = net(torch.ones(1, 2), used)
    try:
        sum(outputs["some"], outputs["own"]).backward()
    except UserError as error:
        return str(error).partition("its backward comes to ")[2].partition(" in another")[0]
    return ""


def test_each_later_backward_repeats_the_first_one() -> None:
    def messages(group: Any) -> list[str]:
        found = []
        for used in ([0, 2], [2, 0], [1, 2], [2], [0, 1, 2]):
            net = Branches()
            BlockCalls(net, list(net.layers), group)
            with torch.no_grad():
                net(torch.ones(1, 2), [1])
            found += [told_by_backward(net, [0, 2]), told_by_backward(net, [0, 2]), told_by_backward(net, used)]
        return found

    first, second = on_threads(2, messages)
    assert first == second
    assert first[0::3] == first[1::3] == [""] * 5
    others = ["", "", "layers.0 and layers.1", "its end and layers.0", "layers.0 and layers.1"]
    assert first[2::3] == others


@pytest.mark.parametrize(
    ("used", "others", "said", "gathered"),
    [
        ([1, 2], [0, 2], "layers.0 and layers.1", [2]),
        ([0], [], "its end and layers.0", []),
        ([0, 2], [2], "its end and layers.0", [2]),
    ],
    ids=["another layer", "no layer", "an end that comes sooner"],
)
def test_in_the_first_backward_ranks_are_compared_before_each_gather(
    used: list[int], others: list[int], said: str, gathered: list[int]
) -> None:
    def messages(group: Any) -> tuple[str, list[int]]:
        net, found = Branches(), list[int]()
        for number, layer in enumerate(net.layers):

            def gather(_: nn.Module, __: Any, output: Tensor, number: int = number) -> None:
                output.register_hook(lambda _: found.append(number))

            layer.register_forward_hook(gather)
        BlockCalls(net, list(net.layers), group)
        return told_by_backward(net, others if group.rank() else used), found

    assert on_threads(2, messages) == [(said, gathered)] * 2
