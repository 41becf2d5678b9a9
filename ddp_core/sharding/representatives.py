"""Which parameters stand for all of an optimizer's when it is tried, and what they are tried with.

What an update in pieces cannot know of a parameter is its shape, the values outside of the piece, and what is on other
ranks. A rule that needs one of them shows with one parameter of each shape. So one of each shape, memory format, dtype
and device of a group is taken, in its real size as long as all of them together have no more than `elements`. Where
they have more, the largest are cropped along their longest dimension: a rule that computes with a size or with other
values still has them to compute with, and only one that asks for a size beyond the cropped one stays unseen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_NOISE = 65537
"""So many random numbers are drawn once and repeated: drawing takes longer than updating."""
_NEIGHBOUR = 64
"""The elements, at most, of a second parameter of a group whose others all have one shape: their places may count."""


@dataclass(frozen=True, eq=False)
class Representative:
    """A parameter to be tried in the place of those that are like it."""

    like: nn.Parameter
    shape: tuple[int, ...]

    def whole(self, scale: float, seed: int) -> nn.Parameter:
        """A parameter with random values, with the memory format and the attributes of the real one."""
        parameter = nn.Parameter(self._memory())
        # Attributes that the user has set are gone in a piece, too.
        vars(parameter).update(vars(self.like))
        self.fill_(parameter.detach(), scale, seed)
        return parameter

    def gradient(self, scale: float, seed: int) -> Tensor:
        """Random values; the last elements are larger than the first ones, so that no piece is like another."""
        gradient = self._memory()
        self.fill_(gradient, scale, seed)
        return gradient

    def fill_(self, values: Tensor, scale: float, seed: int) -> None:
        """Fill with random values of about this scale."""
        count = values.numel()
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(min(count, _NOISE), generator=generator)
        filled = noise.repeat(-(-count // _NOISE))[:count]
        filled *= torch.linspace(0.5, 2.0, count) * scale
        _in_memory(values).copy_(filled)

    def _memory(self) -> Tensor:
        order = sorted(range(self.like.dim()), key=self.like.stride, reverse=True)
        # Where dimensions of size 1 have arbitrary strides the order of the dimensions decides.
        if self.like.is_contiguous():
            order = list(range(self.like.dim()))
        return torch.empty_permuted(self.shape, order, dtype=self.like.dtype, device=self.like.device)


def representatives(optimizer: torch.optim.Optimizer, elements: int) -> list[list[Representative]]:
    """Of each parameter group: one trained parameter of each kind, with `elements` elements together, or about that."""
    kinds: list[dict[Any, nn.Parameter]] = [{} for _ in optimizer.param_groups]
    for group, found in zip(optimizer.param_groups, kinds, strict=True):
        for parameter in group["params"]:
            if parameter.requires_grad:
                found.setdefault(kind_of(parameter), parameter)
    most = elements
    sizes = [each.numel() for found in kinds for each in found.values()]
    while most > 1 and sum(min(size, most) for size in sizes) > elements:
        most //= 2
    chosen = [[Representative(each, cropped(each.shape, most)) for each in found.values()] for found in kinds]
    for group, members in zip(optimizer.param_groups, chosen, strict=True):
        trained = [each for each in group["params"] if each.requires_grad]
        if len(members) == 1 and len(trained) > 1:
            members.append(Representative(trained[1], cropped(trained[1].shape, _NEIGHBOUR)))
    return chosen


def few_representatives(optimizer: torch.optim.Optimizer, elements: int) -> list[list[Representative]]:
    """Of each parameter group: one trained parameter of each number of dimensions, dtype and device, none larger."""
    chosen: list[list[Representative]] = []
    for group in optimizer.param_groups:
        largest: dict[Any, nn.Parameter] = {}
        for parameter in sorted((each for each in group["params"] if each.requires_grad), key=Tensor.numel):
            largest[parameter.dim(), parameter.dtype, parameter.device] = parameter
        chosen.append([Representative(each, cropped(each.shape, elements)) for each in largest.values()])
    return chosen


def kind_of(parameter: nn.Parameter) -> Any:
    """Equal for parameters that no rule can tell apart but by their values and their places in the group."""
    plain = bool | int | float | str
    attributes = [(name, value if isinstance(value, plain) else type(value)) for name, value in vars(parameter).items()]
    contiguous = parameter.is_contiguous()
    strides = None if contiguous else parameter.stride()
    return (tuple(parameter.shape), strides, parameter.dtype, parameter.device, frozenset(attributes))


def cropped(shape: torch.Size | tuple[int, ...], most: int) -> tuple[int, ...]:
    """A shape of at most `most` elements (1 or more); cut lengths are odd, so that rows do not end where vectors do."""
    sizes = list(shape)
    while math.prod(sizes) > most:
        longest = sizes.index(max(sizes))
        sizes[longest] = (sizes[longest] // 2) - 1 | 1
    return tuple(sizes)


def _in_memory(tensor: Tensor) -> Tensor:
    """The memory of a tensor without gaps, in one dimension."""
    return tensor.as_strided((tensor.numel(),), (1,))
