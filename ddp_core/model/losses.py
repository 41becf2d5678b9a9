"""Losses by name: each returns the sum over the samples of a micro-batch, so these sums add up to the global batch's.

A mean would weight samples by the size of their micro-batch; the trainer divides once, by the true number of samples in
the global batch. Each sample contributes what torch's own loss of that name gives for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional

from ddp_core.base.errors import UserError

Loss = Callable[[Any, Any], Tensor]
"""A function of the outputs and targets of a micro-batch, each a tensor or a tree of tensors, to a scalar tensor."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum over samples of the negative log-likelihood: outputs [n, classes] logits, targets [n] int64."""
    return functional.cross_entropy(outputs.float(), targets, reduction="sum")


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum over samples of the squared error's mean over the features: outputs [n, …], as many targets."""
    features = outputs[0].numel()
    return functional.mse_loss(outputs.float(), _like(targets, outputs), reduction="sum") / features


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum over samples of the binary cross-entropy: outputs [n, …] probabilities, as many targets 0 or 1."""
    features = outputs[0].numel()
    return functional.binary_cross_entropy(outputs.float(), _like(targets, outputs), reduction="sum") / features


def sequence_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum over samples of the mean over places: outputs [n, length, classes] logits, targets [n, length] int64."""
    places = targets[0].numel()
    return functional.cross_entropy(outputs.float().flatten(0, 1), targets.flatten(), reduction="sum") / places


def class_hits(outputs: Tensor, targets: Tensor) -> Tensor:
    """How many samples have their largest logit at the target: an int64 scalar on the outputs' device."""
    return (outputs.argmax(dim=1) == targets).sum()


def sequence_hits(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum over samples of the share of places whose largest logit is at the target: a float64 scalar."""
    return (outputs.argmax(dim=-1) == targets).sum().double() / targets[0].numel()


def threshold_hits(outputs: Tensor, targets: Tensor) -> Tensor:
    """How many probabilities fall on the target's side of one half: an int64 scalar on the outputs' device."""
    return ((outputs > 0.5) == (_like(targets, outputs) > 0.5)).sum()


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "sequence_cross_entropy": sequence_cross_entropy,
    "mean_squared_error": mean_squared_error,
    "binary_cross_entropy": binary_cross_entropy,
}

HITS: dict[Loss, Loss] = {
    cross_entropy: class_hits,
    sequence_cross_entropy: sequence_hits,
    binary_cross_entropy: threshold_hits,
}
"""The function that counts the right answers where a loss is used; without an entry there is no accuracy."""


def _like(targets: Tensor, outputs: Tensor) -> Tensor:
    """Targets as float32 in the outputs' shape.

    They are never broadcast: that would silently compare every sample with every other.
    """
    if targets.numel() != outputs.numel():
        raise UserError(
            f"the loss compares outputs of shape {list(outputs.shape)} with targets of shape {list(targets.shape)}; "
            "make the model's outputs and the data's targets hold as many numbers"
        )
    return targets.reshape(outputs.shape).float()
