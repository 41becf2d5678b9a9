"""The memory estimate for a model small enough to count by hand, and what `ddp doctor EXPERIMENT` says about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_core.cli.doctor import _fits, diagnose
from ddp_core.cli.prepare import load_with_settings, prepare
from ddp_core.config.experiment import Optimizer
from ddp_core.config.layout import ShardMode
from ddp_core.config.options import Asked
from ddp_core.experiment.request import build_splits
from ddp_core.run.backward import Backward, BackwardEvent, Leaving
from ddp_core.run.memory import Prediction, estimate_memory, predict, watch_replica
from ddp_core.run.rank_memory import MemoryEstimate, Way
from ddp_core.sharding import Sharding

FLOAT = 4


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum()


def estimate(optimizer: Optimizer, growth: float = 1.0, bucketed: bool = False) -> MemoryEstimate:
    model = nn.Sequential(nn.Linear(10, 20), nn.Sigmoid(), nn.Linear(20, 5))
    return estimate_memory(model, squares, optimizer, torch.randn(8, 10), torch.randn(8, 5), growth, bucketed)


WEIGHTS = (10 * 20 + 20 + 20 * 5 + 5) * FLOAT


def test_weights_gradients_state_and_inputs_are_counted() -> None:
    found = estimate(Optimizer(name="sgd", momentum=0.9))
    assert (found.weights, found.gradients, found.optimizer_state) == (WEIGHTS, WEIGHTS, WEIGHTS)
    assert found.inputs == 8 * (10 + 5) * FLOAT
    assert estimate(Optimizer(name="sgd")).optimizer_state == 0
    assert estimate(Optimizer(name="adam")).optimizer_state == 2 * WEIGHTS
    assert estimate(Optimizer(name="sgd"), bucketed=True).communication == WEIGHTS


def test_the_state_of_any_optimizer_is_counted_by_one_step_of_it() -> None:
    def amsgrad(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), amsgrad=True)

    model = nn.Sequential(nn.Linear(10, 20), nn.Sigmoid(), nn.Linear(20, 5))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    data = (torch.randn(8, 10), torch.randn(8, 5))
    found = estimate_memory(model, squares, amsgrad, *data, averaged=True)
    steps = len(before) * FLOAT
    assert found.optimizer_state == 3 * WEIGHTS + steps
    assert found.averaged_weights == WEIGHTS
    assert dict(found.table())["averaged weights"] == WEIGHTS
    assert found.standing == found.weights + found.averaged_weights + found.optimizer_state + found.inputs
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
    assert "averaged weights" not in dict(estimate(Optimizer()).table())


def test_activations_are_what_backward_needs_each_once() -> None:
    # Backward needs the sigmoid's output and the difference that is squared. The sigmoid and the layer after it both
    # save the sigmoid's output; it is counted once.
    assert estimate(Optimizer()).activations == 8 * (20 + 5) * FLOAT


def test_what_the_batch_decides_grows_with_it_and_the_rest_does_not() -> None:
    small, large = estimate(Optimizer()), estimate(Optimizer(), growth=10)
    assert large.activations == 10 * small.activations
    assert large.inputs == 10 * small.inputs
    assert large.weights == small.weights


def test_nothing_is_left_behind() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    estimate_memory(model, squares, Optimizer(), torch.randn(4, 3), torch.randn(4, 2))
    assert model.weight.grad is None
    assert torch.equal(model.weight, before)


WATCHED = Backward(
    100, 60, 0, (BackwardEvent(40, 40), BackwardEvent(gradient=20), BackwardEvent(60, 60), BackwardEvent(gradient=40))
)


@pytest.mark.parametrize(
    ("sums", "leaving", "highest"),
    [
        # While the last tensor of 60 bytes is used, two gradients of its size are in flight and one of 20 is made.
        (0, None, 60 + 2 * 60 + 20),
        (2, None, 60 + 2 * 60 + 20 + 2 * 60),
        # The gradient of 20 is under way, twice, and half of it stays; sums of the other 40 have not left.
        (0, Leaving(20, 2, 0.5), 60 + 2 * 60 + 2 * 20 + 10),
        (1, Leaving(20, 2, 0.5), 60 + 2 * 60 + 2 * 2 * 20 + 10 + 40),
        # It was added to what is counted elsewhere, and is gone.
        (0, Leaving(), 60 + 2 * 60),
    ],
)
def test_the_highest_moment_of_backward_by_hand(sums: int, leaving: Leaving | None, highest: int) -> None:
    assert WATCHED.highest(1.0, sums, leaving) == highest


def test_a_gradient_that_is_added_at_once_takes_no_place_beside_the_sums() -> None:
    assert WATCHED.highest(1.0, 2, None, added=1) == 60 + 2 * 60 + 2 * 60
    # The gradient of 20 is one with both sums' parts, and these leave once, not three times.
    assert WATCHED.highest(1.0, 2, Leaving(20, 2, 0.5), added=2) == 60 + 2 * 60 + 2 * 20 + 10 + 2 * 40


@pytest.mark.parametrize(
    ("shard", "ranks", "weights", "kept", "sums", "gathered"),
    [
        # Eight micro-batches: 7 are 4 + 2 + 1, three sums. Two ranks with four each: 3 are 2 + 1.
        ("none", 1, WEIGHTS, WEIGHTS, 3 * WEIGHTS, 0),
        ("none", 2, WEIGHTS, WEIGHTS, 2 * WEIGHTS, 0),
        ("none", 8, WEIGHTS, WEIGHTS, 0, 0),
        ("optimizer", 2, WEIGHTS, WEIGHTS // 2, 2 * WEIGHTS, 0),
        # Rounds of two end after 2, 4, 6 = 4 + 2 and 8 micro-batches; a rank has its half of these two sums.
        ("gradients", 2, WEIGHTS, WEIGHTS // 2, 2 * WEIGHTS // 2, 0),
        ("gradients", 4, WEIGHTS, WEIGHTS // 4, WEIGHTS // 4, 0),
        # Layers so small are no blocks: the whole model is gathered.
        ("parameters", 4, WEIGHTS // 4, WEIGHTS // 4, WEIGHTS // 4, WEIGHTS),
    ],
)
def test_what_a_rank_has_by_hand(
    shard: ShardMode, ranks: int, weights: int, kept: int, sums: int, gathered: int
) -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.Sigmoid(), nn.Linear(20, 5))
    replica = watch_replica(model, squares, Optimizer(name="adam"), torch.randn(8, 10), torch.randn(8, 5))
    found = replica.estimate(Way(8, "exact", ranks, Sharding(shard)))
    assert (found.weights, found.gradients, found.optimizer_state) == (weights, kept, 2 * kept)
    assert (found.sums, found.gathered, found.in_update) == (sums, gathered, kept)
    assert found.standing == weights + 2 * kept + 8 * (10 + 5) * FLOAT
    alone = replica.estimate()
    if shard == "none":
        assert found.in_backward == alone.in_backward + sums
        # From the other ranks come their parts of one sum each, or all of it where there are two ranks.
        arriving = {1: 0, 2: WEIGHTS, 8: 7 * -(-WEIGHTS // 8)}[ranks]
        assert replica.estimate(Way(8, "exact", ranks), bucketed=True).communication == WEIGHTS + arriving
    elif shard != "optimizer":
        # Every gradient leaves when the group is whole, which is all of this small model.
        assert found.in_backward - sums - gathered <= alone.in_backward + WEIGHTS


def test_of_blocks_two_are_gathered_at_a_time_and_the_rest_is_always() -> None:
    layers = nn.ModuleList([nn.Linear(256, 256), nn.Linear(256, 512), nn.Sequential(nn.Linear(512, 5))])
    model = nn.Sequential(*(nn.Flatten(), *layers))
    replica = watch_replica(model, squares, Optimizer(), torch.randn(8, 256), torch.randn(8, 5))
    assert (replica.block, replica.rest) == (257 * 512 * FLOAT, 513 * 5 * FLOAT)
    found = replica.estimate(Way(8, "exact", 4, Sharding("parameters")))
    assert found.gathered == (513 * 5 + 2 * 257 * 512) * FLOAT


def test_without_exact_sums_gradients_are_added_where_they_are() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.Sigmoid(), nn.Linear(20, 5))
    replica = watch_replica(model, squares, Optimizer(), torch.randn(8, 10), torch.randn(8, 5))
    assert replica.estimate(Way(8, "plain", 8)) == replica.estimate()
    assert replica.estimate(Way(8, "plain", 4)).sums == WEIGHTS


def test_a_request_is_foreseen_by_its_layout() -> None:
    def found(**asked: Any) -> Prediction | None:
        words: dict[str, Any] = {"experiment": "toy_mlp", "device": "cpu"} | asked
        request = prepare(Asked(**words), "")
        return predict(request, squares, splits, torch.device("cpu"))

    splits = build_splits(load_with_settings("toy_mlp", []), Path("data"))
    alone = found()
    assert alone is not None
    assert alone.weights == 61 * FLOAT
    one_rank = found(layout="ddp", nproc_per_node=1)
    assert one_rank is not None
    assert one_rank.peak == alone.peak + alone.weights, "DistributedDataParallel's buckets"
    assert found(layout="ddp", nproc_per_node=2, shard="optimizer") not in (None, one_rank)
    assert found(layout="dp", nproc_per_node=2) is None
    assert found(settings=["precision=bf16"]) is None


@pytest.mark.parametrize(("room", "words"), [(1000, "data parallelism"), (500, "smaller"), (200, "model parallelism")])
def test_the_advice_follows_from_what_fits(room: int, words: str) -> None:
    parts = {"weights": 100, "gradients": 100, "optimizer_state": 100, "inputs": 10, "activations": 400}
    found = MemoryEstimate(**parts, in_backward=500, in_update=100)
    assert words in _fits(found, 8, room)


def test_doctor_prints_the_estimate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert diagnose("toy_mlp", [], tmp_path) == 0
    said = capsys.readouterr().out
    assert "toy_mlp, one replica, micro-batches of 4 samples" in said
    assert "data parallelism will do" in said
    assert [line.split(",")[0] for line in said.splitlines() if "by what is sharded" in line] == [
        "  each of 2 ranks",
        "  each of 4 ranks",
    ]
