"""Forward and backward of trees of tensors; the update: rates of groups, schedulers, and a resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

from ddp_core.base.digests import optimizer_digest, weights_digest
from ddp_core.checkpoint import Checkpointer, load, newest_valid
from ddp_core.config.experiment import Component, Experiment, Optimizer, Schedule
from ddp_core.model.averaging import WeightAverage
from ddp_core.model.optimizers import build_optimizer
from ddp_core.trainers.passes import Passes, WeightUpdate, call
from ddp_core.trainers.train_state import TrainState

ONE, TWO = torch.ones(3, 2), torch.full((3, 2), 2.0)


class Difference(nn.Module):
    """Calls its two arguments by name or by position, and returns a tree."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, first: Tensor, second: Tensor) -> dict[str, Any]:
        return {"parts": [self.layer(first) - self.layer(second)], "rows": torch.tensor(len(first))}


@pytest.mark.parametrize("inputs", [(TWO, ONE), [TWO, ONE], {"second": ONE, "first": TWO}])
def test_the_model_gets_its_arguments_by_position_or_by_name(inputs: Any) -> None:
    model = Difference()
    assert torch.equal(call(model, inputs)["parts"][0], model(TWO, ONE)["parts"][0])
    assert call(nn.Identity(), TWO) is TWO


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_outputs_are_float32_at_every_place_of_the_tree(precision: str) -> None:
    component = Component(name="here")
    record = Experiment(name="mine", model=component, data=component, global_batch_size=3, precision=precision)
    seen = []

    def loss(outputs: dict[str, Any], targets: dict[str, Tensor]) -> Tensor:
        seen.append((outputs["parts"][0].dtype, outputs["rows"].dtype))
        return (outputs["parts"][0] - targets["wanted"]).square().sum()

    passes, model = Passes(record, loss, torch.device("cpu")), Difference()
    value = passes.loss(model, {"first": TWO, "second": ONE}, {"wanted": ONE})
    passes.backward(value, passes.loss_weight(3))
    assert model.layer.weight.grad is not None
    assert seen == [(torch.float32, torch.int64)]


STEPS = 12
Make = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
SCHEDULES: dict[str, Make] = {
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=STEPS),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05, 4),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(o, 6)], [6]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    vectors = [each for each in model.parameters() if each.dim() == 1]
    matrices = [each for each in model.parameters() if each.dim() == 2]
    return torch.optim.SGD([{"params": matrices}, {"params": vectors, "lr": 0.01}], lr=0.1, momentum=0.9)


def experiment(**fields: Any) -> Experiment:
    return Experiment.model_validate({"name": "mine", "global_batch_size": 8, "epochs": 3} | fields)


def fresh(record: Experiment, make: Make | None = None, average: bool = False) -> tuple[TrainState, WeightUpdate]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    built_in = isinstance(record.optimizer, Optimizer)
    optimizer = build_optimizer(record.optimizer, model, 8) if built_in else two_groups(model)  # type: ignore[arg-type]
    state = TrainState(model, optimizer, schedule=make(optimizer) if make else None)
    state.average = WeightAverage(model, 0.9) if average else None
    return state, WeightUpdate(record, state, 4, partial(nn.utils.clip_grad_norm_, list(model.parameters())))


def trained(state: TrainState, update: WeightUpdate, steps: Sequence[int]) -> list[list[float]]:
    """The rates of every group that the updates of these steps used."""
    used: list[list[float]] = []
    hook = state.optimizer.register_step_pre_hook(
        lambda optimizer, *_: used.append([group["lr"] for group in optimizer.param_groups])
    )
    for step in steps:
        for number, parameter in enumerate(state.model.parameters()):
            parameter.grad = torch.full_like(parameter, (step + 1) / (number + 2)).sin()
        update.make(step)
        assert state.learning_rate == used[-1][0], "the rate that the update used, not the next one's"
        state.step += 1
    hook.remove()
    return used


def digests(state: TrainState) -> tuple[str, ...]:
    averaged = [] if state.average is None else [weights_digest(state.average.state_dict())]
    return (weights_digest(state.model.state_dict()), optimizer_digest(state.optimizer.state_dict()), *averaged)


OWN = {"optimizer": Component(name="here")}


@pytest.mark.parametrize("schedule", [Schedule(), Schedule(name="cosine", warmup_steps=3), Schedule(name="step")])
def test_a_built_in_rule_keeps_the_ratio_of_the_groups(schedule: Schedule) -> None:
    used = trained(*fresh(experiment(schedule=schedule, **OWN)), range(STEPS))
    expected = [[schedule.rate(base, step, 4, STEPS) for base in (0.1, 0.01)] for step in range(STEPS)]
    assert used == expected


def test_the_linear_scaling_rule_counts_for_a_schedule_of_the_files_own() -> None:
    record = experiment(optimizer={"lr": 0.1, "reference_batch": 2}, schedule=Component(name="here"))
    used = trained(*fresh(record, SCHEDULES["ExponentialLR"]), range(3))
    assert used == [[pytest.approx(0.4 * 0.8**step)] for step in range(3)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_torch_is_moved_on_once_per_update_and_continues_after_a_resume(
    name: str, tmp_path: Path
) -> None:
    record = experiment(schedule=Component(name="here"), **OWN)
    torchs = two_groups(nn.Linear(4, 3))
    scheduler, expected = SCHEDULES[name](torchs), []
    for _ in range(STEPS):
        expected.append([group["lr"] for group in torchs.param_groups])
        torchs.step()
        scheduler.step()
    whole, update = fresh(record, SCHEDULES[name], average=True)
    assert trained(whole, update, range(STEPS)) == expected

    first, update = fresh(record, SCHEDULES[name], average=True)
    before = trained(first, update, range(5))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(first.state_dict(), step=5, epoch=1)
    second, update = fresh(record, SCHEDULES[name], average=True)
    checkpoint = newest_valid(tmp_path)
    second.load_state_dict(load(checkpoint))
    assert before + trained(second, update, range(5, STEPS)) == expected
    assert digests(second) == digests(whole)


def test_an_overflow_moves_neither_the_schedule_nor_the_average() -> None:
    record = experiment(schedule=Component(name="here"), **OWN)
    state, update = fresh(record, SCHEDULES["ExponentialLR"], average=True)
    state.scaler = torch.amp.GradScaler("cpu", 4.0)
    rates = []
    for step, overflows in enumerate([False, True, False]):
        for parameter in state.model.parameters():
            parameter.grad = torch.full_like(parameter, torch.inf if overflows else 4.0)
        state.scaler.scale(torch.zeros(()))  # as the loss is, so that the scaler knows the device
        before = digests(state)
        update.make(step)
        assert (digests(state) == before) == overflows
        rates.append(state.learning_rate)
    assert rates == [0.1, pytest.approx(0.08), pytest.approx(0.08)]
    assert int(state.average.n_averaged) == 2


def test_gradients_are_clipped_by_their_true_size_not_by_the_scaled_one() -> None:
    ends = []
    for scale in (1.0, 1024.0):
        state, update = fresh(experiment(clip_norm=0.5, **OWN))
        if scale > 1:
            state.scaler = torch.amp.GradScaler("cpu", scale)
            state.scaler.scale(torch.zeros(()))
        for parameter, size in zip(state.model.parameters(), (0.01, 4.0), strict=True):
            parameter.grad = torch.full_like(parameter, size * scale)
        update.make(0)
        ends.append(digests(state))
    assert ends[1] == ends[0]


def test_an_overflow_in_the_first_step_leaves_no_unwritten_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's fused SGD makes its momentum buffers uninitialised, and skips the kernel that would fill them."""
    before, ends = torch.are_deterministic_algorithms_enabled(), []
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # with NaN
    torch.use_deterministic_algorithms(True)
    for fused in (False, True):
        weight = nn.Parameter(torch.ones(3))
        # Dampening tells a first update, which torch does not dampen, from a later one.
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, dampening=0.5, fused=fused)
        state = TrainState(nn.ParameterList([weight]), optimizer, scaler=torch.amp.GradScaler("cpu", 4.0))
        update = WeightUpdate(experiment(**OWN), state, 4, clip=pytest.fail)
        for step, gradient in enumerate((torch.inf, torch.inf, 1.0, 2.0, torch.inf, 3.0)):
            weight.grad = state.scaler.scale(torch.full((3,), gradient))
            update.make(step)
        ends.append((weight.tolist(), optimizer.state[weight]["momentum_buffer"].tolist()))
    torch.use_deterministic_algorithms(before)
    assert ends[1] == ends[0]
