"""Trainings on ranks that are threads end with the bits of one process: contiguous and strided shares, without DDP."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ddp_core.reduction import ExactReduction
from ddp_core.reduction.messages import PointToPoint
from tests.distributed.exact_cases import CLASSES, SAMPLES, ConvolutionalNet, MixedNet, RandomNet, digest_of
from tests.support.thread_group import on_threads, use_threads


def convolutions() -> nn.Module:
    net = ConvolutionalNet().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    net.dropout.p = 0.0
    return net


class Signs(nn.Module):
    """Each micro-batch has a gradient of -0.0, if any: another zero that is added shows."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(3))
        self.others = nn.Linear(6, CLASSES)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        present = int(rows[0, 0] * 1000) % 3 == 1
        return self.others(rows) + ((self.weights.sum() * -0.0) if present else 0.0)


NETS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": convolutions,
    "dtypes": MixedNet,
    "random": lambda: RandomNet(random.Random(3), True),
    "signs": Signs,
}
STEPS = (6, 6, 1, 4, 6)


def train(net: nn.Module, shares: str, nodes: Sequence[int], group: Any) -> tuple[str, list[str], list[float]]:
    """The digest of weights, buffers and optimizer state; the gradients' signs; the norms."""
    net = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    shape = (1, 6, 6) if isinstance(net, ConvolutionalNet) else (6,)
    rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
    signs, norms = [], []
    options: dict[str, Any] = {"process_group": group, "shares": shares, "node": nodes[rank]}
    with ExactReduction(net, max(STEPS), **options) as exact:
        assert exact.remaining == exact.share == exact.share_of(max(STEPS))
        assert list(exact.share) == (
            list(range(rank, 6, size))
            if shares == "strided"
            else list(range(6))[6 * rank // size : 6 * (rank + 1) // size]
        )
        for step, micro_batches in enumerate(STEPS):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(micro_batches, SAMPLES, *shape, generator=generator)
            targets = torch.randint(0, CLASSES, (micro_batches, SAMPLES), generator=generator)
            if micro_batches != max(STEPS):  # a full step begins by itself
                exact.begin(micro_batches)
            for index in list(exact.remaining):
                with exact.micro_batch(index, weight=1.0 + index):
                    cross_entropy(net(inputs[index]), targets[index], reduction="sum").backward()
            assert not exact.remaining
            exact.finish(scale=1 / (SAMPLES * micro_batches))
            norms.append(exact.clip_gradients_(1.0).item())
            signs += [str(each.grad.sign().tolist()) for each in net.parameters() if each.grad is not None]
            optimizer.step()
    return digest_of(net, optimizer), signs, norms


@pytest.fixture(scope="module", params=NETS)
def trained(request: pytest.FixtureRequest) -> tuple[nn.Module, tuple[str, list[str], list[float]]]:
    """A net, and what its training in one process comes to."""
    torch.manual_seed(0)
    net = NETS[request.param]()
    return net, train(net, "contiguous", [0], None)


@pytest.mark.parametrize(
    ("shares", "nodes", "in_parts"),
    [
        ("contiguous", [0, 0], False),
        ("contiguous", [0, 1, 1], True),
        ("contiguous", [0] * 4, True),
        ("strided", [0, 0], False),
        ("strided", [0] * 4, True),
    ],
)
def test_a_training_ends_with_the_bits_of_one_process(
    trained: tuple[nn.Module, Any], shares: str, nodes: Sequence[int], in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch)
    if in_parts:
        monkeypatch.setattr(PointToPoint, "one_round_bytes", -1)
    net, expected = trained
    for found in on_threads(len(nodes), functools.partial(train, net, shares, nodes)):
        assert found == expected


def test_a_reduction_that_is_closed_in_the_midst_of_a_step_begins_anew() -> None:
    net = nn.Linear(1, 1)
    exact = ExactReduction(net, 2)
    assert exact.remaining == range(2)
    with exact.micro_batch(0):
        net(torch.tensor([[100.0]])).sum().backward()
    exact.close()
    assert exact.remaining == range(2)
    with exact:
        for index in range(2):
            with exact.micro_batch(index):
                net(torch.tensor([[1.0 + index]])).sum().backward()
        exact.finish()
    assert net.weight.grad is not None
    assert net.weight.grad.item() == 3.0


def test_a_module_without_trained_parameters_has_statistics_all_the_same() -> None:
    net = nn.BatchNorm1d(1, momentum=1.0, affine=False)
    with ExactReduction(net, 2) as exact:
        for index in range(2):
            with exact.micro_batch(index):
                net(torch.tensor([[1.0 + index], [3.0 + index]]))
        exact.finish()
    assert net.running_mean is not None
    assert net.running_mean.tolist() == [2.5]
