"""Gradients, taken from their parameters and laid end to end in flat tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ddp_core.torch_internals import foreach_mul_

# Where DDP's buckets do not say, a piece is closed at so many elements (4 MiB of float32): so large that messages are
# few, and so small that a piece stays in a core's cache and its memory is used again.
_FLAT_ELEMENTS = 1024 * 1024


def take_gradients(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """Take every `.grad` away without a copy (None where there is none): a leaf for GradientTree.push."""
    gradients = []
    for parameter in parameters:
        gradients.append(parameter.grad)
        parameter.grad = None
    return gradients


class Gradients:
    """The gradients of a module's parameters, taken away after each backward and set at the end of a step."""

    def __init__(self, module: nn.Module) -> None:
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]

    def clear(self) -> None:
        """Set every `.grad` to None."""
        for parameter in self.parameters:
            parameter.grad = None

    def take(self) -> list[Tensor | None]:
        """`take_gradients`. Raises ValueError for a sparse gradient."""
        gradients = take_gradients(self.parameters)
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            raise ValueError("sparse gradients have no fixed shape to sum in order: use sparse=False")
        return gradients

    def refuse_foreign(self) -> None:
        """Raise RuntimeError if a parameter has a gradient, where all have been taken."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None:
                raise RuntimeError(
                    f"{name} has a gradient from a backward outside of ExactReduction.micro_batch: what adds up in "
                    ".grad is added in another order; run each backward in a micro_batch of its own"
                )

    def scale_(self, factor: float) -> None:
        """Multiply every `.grad` by `factor`."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if factor != 1.0 and gradients:
            foreach_mul_(gradients, factor)


def flat_groups(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group the positions of tensors of one dtype and device in pieces of bounded size, the same on every rank."""
    groups: list[list[int]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for position, tensor in enumerate(tensors):
        key = (tensor.dtype, tensor.device)
        group, elements = open_groups.get(key, ([], _FLAT_ELEMENTS))
        if elements >= _FLAT_ELEMENTS:
            group, elements = [], 0
            groups.append(group)
        group.append(position)
        open_groups[key] = (group, elements + tensor.numel())
    return groups


def views_of(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Cut a bucket as DDP does: in the parameter's own memory order where that is dense.

    (torch/csrc/distributed/c10d/reducer.cpp, initialize_bucket_views; GradBucket.gradients ignores the order.)
    """
    views, start = [], 0
    for parameter in parameters:
        part = flat[start : start + parameter.numel()]
        start += parameter.numel()
        reach = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True)) + 1
        dense = parameter.numel() > 0 and reach == parameter.numel()
        views.append(part.as_strided(parameter.shape, parameter.stride()) if dense else part.view(parameter.shape))
    return views


def fill_(views: Sequence[Tensor], gradients: Iterable[Tensor | None]) -> None:
    """Copy each gradient into its view; a missing one becomes -0.0, which changes no number when added."""
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None:
            view.fill_(-0.0)
        else:
            view.copy_(gradient)
