"""Models: output shapes and parameter counts; losses: compared with torch's own means."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from ddp_core.model.builders import MODELS
from ddp_core.model.losses import HITS, binary_cross_entropy, cross_entropy, mean_squared_error, sequence_cross_entropy
from ddp_core.model.transformer import transformer
from tests.support.wording import refusing


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


def test_a_transformer_predicts_from_what_comes_before() -> None:
    model = transformer(symbols=9, length=6, width=8, depth=2, heads=2).eval()
    text = torch.randint(0, 9, (3, 6))
    changed = torch.cat((text[:, :4], (text[:, 4:] + 1) % 9), dim=1)
    before, after = model(text), model(changed)
    assert before.shape == (3, 6, 9)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.isclose(before[:, 4:], after[:, 4:]).all(dim=-1).any()
    torch.testing.assert_close(model(text[:, :2]), before[:, :2])
    with refusing():
        model(torch.zeros(1, 7, dtype=torch.int64))
    for name, options in (("mlp", {"sizes": [3]}), ("small_cnn", {"image_size": 2}), ("transformer", {"width": 10})):
        with refusing():
            MODELS[name](**options)


def test_losses_are_torchs_means_times_the_samples() -> None:
    torch.manual_seed(0)
    close = torch.testing.assert_close
    logits, classes = torch.randn(7, 4), torch.randint(0, 4, (7,))
    close(cross_entropy(logits, classes), 7 * functional.cross_entropy(logits, classes))
    texts, symbols = torch.randn(7, 5, 4), torch.randint(0, 4, (7, 5))
    close(sequence_cross_entropy(texts, symbols), 7 * functional.cross_entropy(texts.transpose(1, 2), symbols))
    outputs, targets = torch.randn(7, 3), torch.randn(7, 3)
    close(mean_squared_error(outputs, targets), 7 * functional.mse_loss(outputs, targets))
    chances, labels = torch.rand(7, 1), torch.randint(0, 2, (7,)).float()
    expected = 7 * functional.binary_cross_entropy(chances, labels[:, None])
    close(binary_cross_entropy(chances, labels), expected)


def test_losses_compute_in_fp32_and_never_broadcast() -> None:
    half = torch.randn(4, 3).bfloat16()
    for loss, targets in ((cross_entropy, torch.tensor([0, 1, 2, 0])), (mean_squared_error, torch.randn(4, 3))):
        assert loss(half, targets).dtype == torch.float32
    column = torch.randn(4, 1)
    assert mean_squared_error(column, column[:, 0]) == 0
    with refusing():
        mean_squared_error(column, torch.randn(4, 2))


def test_hits_count_right_answers() -> None:
    outputs = torch.tensor([[2.0, 1.0], [0.0, 1.0], [5.0, 1.0]])
    assert HITS[cross_entropy](outputs, torch.tensor([0, 0, 0])) == 2
    assert HITS[binary_cross_entropy](torch.tensor([[0.9], [0.2], [0.7]]), torch.tensor([1.0, 0.0, 0.0])) == 2
    texts = torch.stack((outputs, outputs.flip(1)))  # guessed: 0, 1, 0 and 1, 0, 1
    assert HITS[sequence_cross_entropy](texts, torch.tensor([[0, 0, 0], [1, 0, 1]])) == pytest.approx(2 / 3 + 1)
    assert mean_squared_error not in HITS
