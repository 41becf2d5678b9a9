"""The experiment's optimizer over a model's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ddp_core.spec.experiment import Optimizer


def build_optimizer(settings: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over the model's trainable parameters, on the device that they are on."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    chosen = implementation(settings, parameters)
    pinned = {"foreach": chosen == "foreach", "fused": chosen == "fused"}
    if settings.name == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=settings.lr,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            weight_decay=settings.weight_decay,
            **pinned,
        )
    kind = torch.optim.AdamW if settings.name == "adamw" else torch.optim.Adam
    return kind(
        parameters,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        **pinned,
    )


def implementation(settings: Optimizer, parameters: Sequence[Tensor]) -> Literal["fused", "foreach", "loop"]:
    """The implementation that is used for these parameters; the same on every rank, as the parameters are."""
    if settings.implementation == "fused" and all(map(_fits_fused, parameters)):
        return "fused"
    # On CPU foreach gives the same bits, but each operation runs over all tensors before the next: the cache is cold.
    if settings.implementation == "foreach" and any(parameter.is_cuda for parameter in parameters):
        return "foreach"
    return "loop"


def _fits_fused(parameter: Tensor) -> bool:
    # The CPU's fused kernels walk parameter and gradient by address: where their strides differ they mix up elements,
    # silently (aten/src/ATen/native/cpu/FusedSGDKernel.cpp).
    return parameter.is_floating_point() and parameter.is_contiguous()
