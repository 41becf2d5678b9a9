"""nn.DataParallel's step rendered on CPU: its outputs and gradients are the module's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ddp_lab.claims.measuring.rendered_data_parallel import RenderedDataParallel


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()


def trained(module: nn.Module, parameters: list[nn.Parameter]) -> tuple[Tensor, list[Tensor]]:
    inputs = torch.randn(7, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    outputs = module(inputs)
    nn.functional.cross_entropy(outputs, torch.arange(7) % 5).backward()
    return outputs.detach(), [parameter.grad for parameter in parameters if parameter.grad is not None]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_outputs_and_gradients_are_the_modules_own(count: int) -> None:
    alone, several = model(), model()
    outputs, gradients = trained(alone, list(alone.parameters()))
    found, ours = trained(RenderedDataParallel(several, count), list(several.parameters()))
    torch.testing.assert_close(found, outputs)
    torch.testing.assert_close(ours, gradients)
