"""The operations of a forward, and what comes back from it: the first that another computation has otherwise.

Tests trainers/operations.py, too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddp_core.observe.operations import Operations, differing


class Shifted(nn.Module):
    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.sin(inputs) + self.shift


def noted(shift: float = 0.0, factor: float = 1.0, is_other: bool = False) -> list[tuple[str, str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), Shifted(shift))
    with Operations(model) as operations:
        outputs = model(torch.ones(2, 3))
        loss = outputs.square().sum() + (outputs.sum() if is_other else 0)
    (factor * loss).backward()
    return operations.noted


def test_the_first_operation_with_another_result_is_named() -> None:
    assert list(differing(noted(), noted())) == []
    assert next(differing(noted(), noted(shift=1e-6))) == "the result of aten.add.Tensor in 2 (Shifted)"
    assert next(differing(noted(), noted(factor=2.0))) == "the gradient that comes back to 2 (Shifted)"


def test_what_only_one_computes_is_not_compared() -> None:
    assert list(differing(noted(), noted(is_other=True))) == []


def test_nothing_is_noted_after_the_block() -> None:
    model = nn.Linear(2, 2)
    with Operations(model) as operations:
        model(torch.ones(1, 2))
    before = len(operations.noted)
    model(torch.ones(1, 2)).sum().backward()
    assert len(operations.noted) == before > 0
