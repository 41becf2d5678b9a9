"""Sums, norms, softmax and losses: what adds up many numbers, in whichever order the library chooses."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ddp_lab.probe.operations.inputs import Operations, backward, integers, numbers, positive


def sums() -> Operations:
    """Reductions of tensors, softmax, norms of gradients."""
    long, table = partial(numbers, 20_011), partial(numbers, 137, 211)
    differentiated: dict[str, tuple[Any, ...]] = {
        "softmax": (partial(torch.softmax, dim=1), numbers(31, 67, scale=8)),
        "softmax over columns": (partial(torch.softmax, dim=0), numbers(31, 67, scale=8)),
        "log_softmax": (partial(torch.log_softmax, dim=1), numbers(31, 67, scale=8)),
        "cdist": (torch.cdist, numbers(9, 5), numbers(7, 5, key=1)),
        "cosine_similarity": (functional.cosine_similarity, numbers(9, 65), numbers(9, 65, key=1)),
        "normalize": (functional.normalize, numbers(9, 65)),
    }
    return backward(differentiated) | {
        "sum": lambda: [long().sum(), table().sum(0), table().sum(1), long(dtype=torch.float64).sum()],
        "sum bfloat16": lambda: [long(dtype=torch.bfloat16).sum(), table(dtype=torch.bfloat16).sum(0)],
        "sum over two dimensions": lambda: numbers(7, 13, 19, 23).sum((0, 2)),
        "mean": lambda: [long().mean(), table().mean(0), table().mean(1)],
        "var": lambda: [long().var(), table().var(0), table().var(1)],
        "std": lambda: [long().std(), table().std(0)],
        "norm": lambda: [torch.linalg.vector_norm(long()), torch.linalg.vector_norm(table(), dim=1)],
        "norms 1 and infinity": lambda: [torch.linalg.vector_norm(long(), order) for order in (1, float("inf"))],
        "norm 3": lambda: torch.linalg.vector_norm(long(), 3),
        "prod": lambda: (1 + table() / 64).prod(1),
        "cumsum": lambda: [long().cumsum(0), table().cumsum(1)],
        "cumprod": lambda: (1 + table() / 64).cumprod(0),
        "logsumexp": lambda: numbers(31, 67, scale=8).logsumexp(1),
        "max, min, argmax": lambda: [table().max(1), table().amin(0), long().argmax()],
        "median, quantile": lambda: [long().median(), numbers(401).quantile(0.3)],
        "clip_grad_norm_": _clipped,
        "histc, bincount": lambda: [torch.histc(long(), 17, -1, 1), torch.bincount(integers(999, below=31))],
    }


def _clipped() -> list[torch.Tensor]:
    parameters = [nn.Parameter(numbers(size, key=size)) for size in (3, 1000, 77)]
    for parameter in parameters:
        parameter.grad = numbers(*parameter.shape, key=5)
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    return [norm, *(parameter.grad for parameter in parameters if parameter.grad is not None)]


def losses() -> Operations:
    """Losses, forward and backward."""
    logits, classes = numbers(33, 10, scale=8), integers(33, below=10, key=1)
    values, targets, shares = numbers(999, scale=4), numbers(999, key=1), positive(999, key=2, scale=0.5)
    of_values = {
        "mse_loss": functional.mse_loss,
        "l1_loss": functional.l1_loss,
        "smooth_l1_loss": functional.smooth_l1_loss,
        "huber_loss": functional.huber_loss,
    }
    differentiated: dict[str, tuple[Any, ...]] = {
        "cross_entropy": (lambda x: functional.cross_entropy(x, classes), logits),
        "cross_entropy with smoothing": (
            lambda x: functional.cross_entropy(x, classes, label_smoothing=0.1, reduction="sum"),
            logits,
        ),
        "binary_cross_entropy": (lambda x: functional.binary_cross_entropy(x, targets.gt(0).float()), shares),
        "binary_cross_entropy_with_logits": (
            lambda x: functional.binary_cross_entropy_with_logits(x, targets.gt(0).float()),
            values,
        ),
        "kl_div": (
            lambda x: functional.kl_div(x.log_softmax(1), numbers(33, 10, key=3).softmax(1), reduction="batchmean"),
            logits,
        ),
        "nll of a Gaussian": (lambda x, y: functional.gaussian_nll_loss(x, targets, y), values, shares),
        "ctc_loss": (
            lambda x: functional.ctc_loss(
                x.log_softmax(2), integers(3, 4, below=9) + 1, torch.full((3,), 20), torch.full((3,), 4)
            ),
            numbers(20, 3, 10, scale=4),
        ),
        "triplet_margin_loss": (functional.triplet_margin_loss, *(numbers(9, 65, key=key) for key in range(3))),
    }
    differentiated |= {name: (lambda x, loss=loss: loss(x, targets), values) for name, loss in of_values.items()}
    return backward(differentiated)


def norms() -> Operations:
    """Normalising layers, forward and backward."""
    images = partial(numbers, 8, 6, 7, 9, scale=4)
    differentiated: dict[str, tuple[Any, ...]] = {
        "batch_norm": (nn.BatchNorm2d(6), images()),
        "batch_norm of 1d": (nn.BatchNorm1d(13), numbers(31, 13)),
        "batch_norm channels_last": (nn.BatchNorm2d(6), images().contiguous(memory_format=torch.channels_last)),
        "batch_norm in evaluation": (nn.BatchNorm2d(6).eval(), images()),
        "layer_norm": (nn.LayerNorm(65), numbers(31, 65)),
        "group_norm": (nn.GroupNorm(3, 6), images()),
        "instance_norm": (nn.InstanceNorm2d(6, affine=True), images()),
        "rms_norm": (nn.RMSNorm(65), numbers(31, 65)),
    }
    differentiated["local_response_norm"] = (partial(functional.local_response_norm, size=3), images())
    return backward(differentiated)
