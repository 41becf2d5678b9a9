"""The moving average of weights and buffers, against its definition."""

from __future__ import annotations

import torch
from torch import nn

from ddp_core.model.averaging import WeightAverage

DECAY = 0.75


class Masked(nn.Module):
    """A tied weight, batch-norm statistics, whole numbers, and a mask with infinities."""

    positions: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("positions", torch.arange(7, 12))
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1), persistent=False)


def test_weights_and_statistics_follow_the_definition_and_other_buffers_are_copied() -> None:
    torch.manual_seed(0)
    model = Masked()
    average = WeightAverage(model, DECAY)
    expected: dict[str, torch.Tensor] = {}
    for step in range(5):
        with torch.no_grad():
            for tensor in [*model.parameters(), model.norm.running_mean, model.norm.running_var]:
                tensor.add_(torch.randn_like(tensor))
            model.positions.add_(1)
        average.update_parameters(model)
        for name, value in model.state_dict().items():
            ours = value.clone() if step == 0 else DECAY * expected[name] + (1 - DECAY) * value
            expected[name] = ours if value.is_floating_point() else value.clone()
    module = average.module
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, expected[name], msg=name)
    assert module.positions.tolist() == [12, 13, 14, 15, 16]
    assert torch.equal(module.mask, model.mask)
    assert module.one.weight is module.two.weight
    assert module.one.weight is not model.one.weight


def test_frozen_parameters_of_whole_numbers_are_copied() -> None:
    for with_weights_first in (True, False):
        model = nn.Module()
        if with_weights_first:
            model.add_module("layer", nn.Linear(2, 2))
        model.codes = nn.Parameter(torch.arange(-128, 128).to(torch.int8), requires_grad=False)
        model.waves = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        average = WeightAverage(model, DECAY)
        average.update_parameters(model)
        with torch.no_grad():
            model.waves.fill_(4 + 8j)
        for held_back in (None, torch.tensor(0.0)):
            average.update_parameters(model, held_back)
            assert torch.equal(average.module.get_parameter("codes"), model.codes)
        assert average.module.get_parameter("waves").tolist() == [1.75 + 3.5j] * 3
