"""Which rank owns which elements of the parameters, where each rank updates a part of them.

1. Parameters of one dtype and device are laid out one after the other in a flat tensor, a few of them in each.
2. Every flat tensor is cut into W neighbouring ranges of about one size; each rank owns one.
3. What a range has of one parameter is a *piece*: the unit that a rank reduces, updates and sends.

A cut lies at a multiple of `BLOCK` elements from the start of the parameter in which it lies, or at its end. So an
optimizer's vectorised kernel treats each element of a piece as it does in the whole parameter, and the blocks of which
the gradient's norm is made (`ddp_core.reduction.norm`) are never cut. Each parameter starts at a multiple of
`LINE_BYTES`, as in memory of its own, because matrix products may have other bits where their operands are aligned in
another way.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.reduction.exchange import LINE_BYTES
from ddp_core.reduction.flat import fill_, flat_groups, in_memory_order, view_in
from ddp_core.reduction.norm import BLOCK

from .owned import Owned

_ALONE = 256 * 1024
"""A parameter of so many elements has a flat tensor to itself, so that its gradient is sent without being copied."""


class FlatGroup:
    """Parameters that lie in one flat tensor, and the ranges of it that the ranks own."""

    def __init__(self, positions: Sequence[int], parameters: Sequence[nn.Parameter], order: Sequence[int]) -> None:
        self.positions = list(positions)
        """The group's parameters, as positions among all parameters."""
        self.like = [parameters[position] for position in positions]
        """The parameters themselves."""
        line = LINE_BYTES // self.like[0].element_size()
        sizes = [parameter.numel() for parameter in self.like]
        self.starts = [0, *itertools.accumulate(-(-size // line) * line for size in sizes)]
        """Where each parameter begins in the flat tensor, and at last the flat tensor's size."""
        self.starts[-1] = self.starts[-2] + sizes[-1]
        world_size = len(order)
        borders = [_border(self.starts[-1] * place // world_size, self.starts) for place in range(world_size + 1)]
        ranges = dict(zip(order, itertools.pairwise(borders), strict=True))
        self.cuts = [slice(*ranges[rank]) for rank in range(world_size)]
        """The range of each rank."""
        self.flat = self.like[0].detach().new_zeros(self.starts[-1])
        """The parameters' memory."""
        with torch.no_grad():
            for start, parameter in zip(self.starts, self.like, strict=False):
                # A storage of its own over a part of the memory: what writes a model to a file writes whole storages,
                # and safetensors refuses a parameter that is only a part of one.
                own = torch.from_dlpack(self.flat[start : start + parameter.numel()])
                parameter.data = view_in(own, parameter).copy_(parameter)

    def views(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor's parts, each with the shape and the sequence in memory of its parameter."""
        return [
            view_in(flat[start : start + parameter.numel()], parameter)
            for start, parameter in zip(self.starts, self.like, strict=False)
        ]

    def flattened(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """The values of all parameters (-0.0 for None) in a flat tensor: that of one parameter alone may be its own."""
        first = tensors[0]
        if len(tensors) == 1 and first is not None and first.dtype == self.flat.dtype:
            return in_memory_order(first, self.like[0])
        flat = torch.empty_like(self.flat)  # what lies between two parameters is arbitrary
        fill_(self.views(flat), tensors)
        return flat


class Shards:
    """What each rank owns: `parameters`, moved into flat tensors (`groups`) that are cut for ranks in `order`.

    The parameters stay the same objects with the same values and strides; their memory is new. So make it when the
    model is on its device, and do not move the model afterwards. The same on every rank that has the same parameters.
    Raises ValueError for no parameters. None of them may share memory (`refuse_shared_memory`).
    """

    def __init__(self, parameters: Sequence[nn.Parameter], order: Sequence[int]) -> None:
        self.parameters = list(parameters)
        if not self.parameters:
            raise ValueError("no parameter is trainable, so there is nothing to shard")
        self.groups = [FlatGroup(positions, self.parameters, order) for positions in shard_groups(self.parameters)]
        """In the sequence of their first parameters."""

    def owned(self, rank: int, names: Sequence[str]) -> list[Owned]:
        """What `rank` owns of each parameter, of which these are the names, in their sequence.

        What it updates shares the parameter's memory, and has a gradient of its own. Of a parameter that is a single
        number it stays one: so all that an optimizer keeps of it has its shape.
        """
        found = [Owned(name, whole, 0, 0, None) for name, whole in zip(names, self.parameters, strict=True)]
        for group in self.groups:
            cut = group.cuts[rank]
            for position, begin, whole in zip(group.positions, group.starts, group.like, strict=False):
                start, stop = max(cut.start - begin, 0), min(cut.stop - begin, whole.numel())
                # A parameter without elements has a state in an optimizer, too.
                if start < stop or (not whole.numel() and rank == 0):
                    stop = max(start, stop)
                    own = group.flat[begin + start : begin + stop] if whole.dim() else group.flat[begin]
                    found[position] = Owned(names[position], whole, start, stop, nn.Parameter(own))
        return found


def shard_groups(parameters: Sequence[Tensor]) -> list[list[int]]:
    """Which parameters, given by their positions, lie in one flat tensor."""
    small = [position for position, each in enumerate(parameters) if each.numel() < _ALONE]
    groups = flat_groups([parameters[position] for position in small])
    alone = [[position] for position, each in enumerate(parameters) if each.numel() >= _ALONE]
    return sorted(alone + [[small[member] for member in group] for group in groups])


def _border(wanted: int, starts: Sequence[int]) -> int:
    """The place nearest to `wanted` where a flat tensor may be cut: none lies behind that of a larger `wanted`."""
    if wanted >= starts[-1]:
        return starts[-1]
    member = bisect.bisect_right(starts, wanted) - 1
    lower = starts[member] + (wanted - starts[member]) // BLOCK * BLOCK
    # Behind a parameter's last element lies what fills its last line, so the next range starts with the next parameter.
    upper = min(lower + BLOCK, starts[member + 1])
    return min(lower, upper, key=lambda place: abs(place - wanted))


def refuse_shared_memory(module: nn.Module) -> None:
    """Raise UserError (2) where a parameter shares memory with another one, or with a buffer: a cut would part them."""
    named: list[tuple[str, Tensor, bool]] = [(name, each, True) for name, each in module.named_parameters()]
    named += [(name, each, False) for name, each in module.named_buffers()]
    named = [each for each in named if each[1].numel() and each[1].layout is torch.strided and not each[1].is_meta]
    ends: dict[tuple[torch.device, bool], tuple[int, str]] = defaultdict(lambda: (0, ""))
    for name, tensor, is_parameter in sorted(named, key=lambda each: each[1].data_ptr()):
        begin = tensor.data_ptr()
        for kind in (True, False):
            end, other = ends[tensor.device, kind]
            if begin < end and (kind or is_parameter):
                raise UserError(
                    f"{other} and {name} share memory, which --shard would part: use one nn.Parameter for both, or "
                    "clone() one of them; or leave --shard out"
                )
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        own = (begin + reach * tensor.element_size(), name)
        ends[tensor.device, is_parameter] = max(ends[tensor.device, is_parameter], own)
