"""Batches that are trees of tensors: how the model is called, mixed precision, and what nn.DataParallel can cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_core.config.experiment import Component, Experiment
from ddp_core.trainers.data_parallel import _joined
from ddp_core.trainers.passes import Passes, call
from tests.support.wording import refusing

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


def test_a_round_of_data_parallel_is_joined_at_every_place_of_the_tree() -> None:
    whole = {"x": torch.arange(10.0).view(5, 2)}, [torch.arange(5)]
    parts = [({"x": whole[0]["x"][rows]}, [whole[1][0][rows]]) for rows in (slice(0, 3), slice(3, 5))]
    inputs, targets = _joined(parts, [3, 2])
    assert torch.equal(inputs["x"], whole[0]["x"])
    assert torch.equal(targets[0], whole[1][0])


@pytest.mark.parametrize("other", [torch.ones(2, 4), torch.ones(7)])
def test_what_data_parallel_cannot_cut_is_refused(other: Tensor) -> None:
    with refusing():
        _joined([(ONE, torch.ones(3)), (other, torch.ones(2))], [3, 2])
