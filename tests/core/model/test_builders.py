"""Models by their names: output shapes and parameter counts."""

from __future__ import annotations

import pytest
import torch

from ddp_core.model.builders import MODELS


@pytest.mark.parametrize(
    ("name", "options", "inputs", "outputs", "parameters"),
    [
        ("linear", {}, (1,), (1,), 2),
        ("sigmoid_classifier", {}, (10,), (1,), 11),
        ("two_layer", {}, (10,), (1,), 61),
        ("mlp", {"sizes": [64, 64, 10]}, (1, 8, 8), (10,), 4810),
        ("mlp", {"sizes": [6, 4], "dropout": 0.5}, (6,), (4,), 28),
        ("small_cnn", {"width": 4}, (1, 8, 8), (10,), None),
        ("small_cnn", {"width": 4, "image_size": 28, "classes": 3}, (1, 28, 28), (3,), None),
        ("resnet18", {}, (3, 64, 64), (10,), 11_181_642),
        ("resnet18", {"small_input": True, "classes": 7}, (3, 32, 32), (7,), 11_181_642 - 3 * 513 - 64 * 3 * (49 - 9)),
    ],
)
def test_shapes_and_sizes(
    name: str, options: dict[str, object], inputs: tuple[int, ...], outputs: tuple[int, ...], parameters: int | None
) -> None:
    torch.manual_seed(1)
    model = MODELS[name](**options)
    assert model(torch.rand(2, *inputs)).shape == (2, *outputs)
    torch.manual_seed(1)
    assert all(map(torch.equal, model.parameters(), MODELS[name](**options).parameters())), "torch draws them"
    assert not all(map(torch.equal, model.parameters(), MODELS[name](**options).parameters())), "not from one seed"
    if parameters is not None:
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters
