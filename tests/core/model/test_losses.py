"""Losses, compared with torch's own means, and what they count as right."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from ddp_core.model.losses import HITS, binary_cross_entropy, cross_entropy, mean_squared_error, sequence_cross_entropy
from tests.support.wording import refusing


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
