"""The memory estimate for a model small enough to count by hand, and what `ddp doctor EXPERIMENT` says about it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddp_core.commands.doctor import _fits, doctor
from ddp_core.commands.memory import MemoryEstimate, estimate_memory
from ddp_core.spec.experiment import Optimizer

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


@pytest.mark.parametrize(("room", "words"), [(1000, "data parallelism"), (500, "smaller"), (200, "model parallelism")])
def test_the_advice_follows_from_what_fits(room: int, words: str) -> None:
    parts = {"weights": 100, "gradients": 100, "optimizer_state": 100, "inputs": 10, "activations": 400}
    found = MemoryEstimate(**parts, in_backward=500, in_update=100)
    assert words in _fits(found, 8, room)


def test_doctor_prints_the_estimate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert doctor("toy_mlp", [], tmp_path) == 0
    said = capsys.readouterr().out
    assert "toy_mlp, one replica, micro-batches of 4 samples" in said
    assert "data parallelism will do" in said
