"""Gradients, taken from their parameters and laid end to end in flat tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ddp_core.base.torch_internals import foreach_mul_

_FLAT_ELEMENTS = 1024 * 1024
"""A flat tensor takes no further gradient from so many elements on (4 MiB of float32).

Such a tensor makes messages few, and still stays in a core's cache until its memory is used again.
"""


def take_gradients(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """Take every `.grad` away without a copy (None where there is none): a leaf for GradientTree.push."""
    gradients = []
    for parameter in parameters:
        gradients.append(parameter.grad)
        parameter.grad = None
    return gradients


class Gradients:
    """The gradients of those of `named` that are trained, taken away after each backward and set at a step's end."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        trained = {name: parameter for name, parameter in named if parameter.requires_grad}
        self.names, self.parameters = list(trained), list(trained.values())

    def take(self, positions: Iterable[int] | None = None) -> list[Tensor | None]:
        """`take_gradients`, of all or of the parameters at these positions. Raises ValueError for a sparse gradient."""
        taken = self.parameters if positions is None else [self.parameters[position] for position in positions]
        gradients = take_gradients(taken)
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            raise ValueError("sparse gradients have no fixed shape to sum in order: use sparse=False")
        return gradients

    def refuse_foreign(self) -> None:
        """Raise RuntimeError if a parameter has a gradient although all have been taken.

        `TrainedParameters` refuses a parameter that is trained only since this was made, whose gradient nobody takes.
        """
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None:
                raise RuntimeError(
                    f"{name} has a gradient from a backward outside of ExactReduction.micro_batch: what adds up in "
                    ".grad is added in another order; run each backward in a micro_batch of its own"
                )


def scale_gradients_(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply every `.grad` by `factor`, with `foreach_mul_` alone: in bfloat16, `Tensor.mul_` has other bits."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if factor != 1.0 and gradients:
        foreach_mul_(gradients, factor)


def flat_groups(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Which tensors, given by their positions, go into one flat tensor: of one dtype and device, up to a bounded size.

    The same on every rank that has tensors of the same sizes, dtypes and devices.
    """
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
    """The parts of a flat tensor, each with the shape of its parameter and, where that has no gaps, its memory order.

    DDP cuts a bucket in this way (torch/csrc/distributed/c10d/reducer.cpp, initialize_bucket_views), but
    GradBucket.gradients ignores the memory order.
    """
    views, start = [], 0
    for parameter in parameters:
        views.append(view_in(flat[start : start + parameter.numel()], parameter))
        start += parameter.numel()
    return views


def view_in(part: Tensor, like: Tensor) -> Tensor:
    """View a tensor of one dimension with the shape of `like` and, where that has no gaps, its memory order."""
    return part.as_strided(like.shape, like.stride()) if _has_no_gaps(like) else part.view(like.shape)


def in_memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """The elements of `tensor` in one dimension, in the memory order of `like` (`view_in`); a view where possible."""
    if _has_no_gaps(like) and tensor.stride() == like.stride():
        return tensor.as_strided((like.numel(),), (1,))
    flat = tensor.new_empty(like.numel())
    view_in(flat, like).copy_(tensor)
    return flat


def _has_no_gaps(tensor: Tensor) -> bool:
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * stride for size, stride in strides) + 1 == tensor.numel()


def laid_out(gradients: Iterable[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """The gradients end to end in a flat tensor of their own, each in the memory order of its place in `like`."""
    flat = like[0].new_empty(sum(map(Tensor.numel, like)))
    fill_(views_of(flat, like), gradients)
    return flat


def fill_(views: Sequence[Tensor], gradients: Iterable[Tensor | None]) -> None:
    """Copy each gradient into its view; a missing one becomes -0.0, which changes no number when added."""
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None:
            view.fill_(-0.0)
        else:
            view.copy_(gradient)


def record_use(tensors: Iterable[Tensor | None]) -> None:
    """Keep the memory of CUDA tensors from being used anew before the current stream has read them."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
