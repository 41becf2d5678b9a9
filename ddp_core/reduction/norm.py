"""The norm of a gradient in one fixed order of additions, so that clipping does not depend on the layout.

1. Cut each parameter's gradient, as it lies in memory, into blocks of 1024 elements; fill the last one with zeros.
2. Square the elements, and fold each block in halves: the sums of elements i and i + 512, then i and i + 256, and on.
3. Lay the sums of all blocks of all parameters end to end, fill with zeros up to a power of two, and fold in halves.
4. The norm is the square root.

A library's own sum or norm adds in an order that depends on the tensor's shape, so that of pieces would have other bits
than that of the whole. Here every addition is one of two numbers. Numbers are float64: squares of float32 are then
exact, and none overflows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddp_core.base.torch_internals import foreach_copy_, foreach_mul_

from .flat import in_memory_order

BLOCK = 1024
"""Elements whose squares are added up in halves."""
_ON_CPU, _ON_GPU = 2**7, 2**14
"""Blocks that are squared and folded at once: on a CPU as many as stay in a core's cache, and many more on a GPU, where
an operation takes the host longer than the device."""

Piece = tuple[int, Tensor]
"""The number of a block among those of all parameters, and a flat tensor that begins with this block."""


def gradient_norm(parameters: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of the whole gradient: a float64 scalar on the parameters' device.

    `parameters` are all that are trained, in the same sequence on every layout; one without `.grad` counts as zero.
    """
    begins = first_blocks(parameter.numel() * (1 + parameter.is_complex()) for parameter in parameters)
    sums = torch.zeros(begins[-1], dtype=torch.float64, device=parameters[0].device)
    put_block_sums(
        sums,
        (
            (begin, _real(in_memory_order(parameter.grad, parameter)))
            for begin, parameter in zip(begins, parameters, strict=False)
            if parameter.grad is not None
        ),
    )
    return norm_of(sums)


def _real(gradient: Tensor) -> Tensor:
    return torch.view_as_real(gradient.resolve_conj()).view(-1) if gradient.is_complex() else gradient


def first_blocks(sizes: Iterable[int]) -> list[int]:
    """The number of each parameter's first block, given their numbers of elements, and at last that of all blocks."""
    return [0, *itertools.accumulate(-(-size // BLOCK) for size in sizes)]


def norm_of(sums: Tensor) -> Tensor:
    """The norm from the sums of the squares of all blocks."""
    width = 1 << len(sums).bit_length()
    return _folded_(pad(sums, (0, width - len(sums))).view(1, width)).sqrt()[0]


def clip_gradients_(parameters: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply every `.grad` by max_norm / norm where that is below 1, as torch.nn.utils.clip_grad_norm_ does."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    gradients: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradients.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for dtype, tensors in gradients.items():
        foreach_mul_(tensors, factor.to(torch.promote_types(dtype, torch.float32)))


@torch.no_grad()
def put_block_sums(sums: Tensor, pieces: Iterable[Piece]) -> None:
    """Write the sums of the squares of the blocks of these pieces to their places in `sums`.

    A piece ends with a block or with its parameter.
    """
    for group in _groups(pieces, _ON_CPU if sums.device.type == "cpu" else _ON_GPU):
        counts = [_blocks(part) for _, part in group]
        rows = _laid_out([part for _, part in group], counts).double().view(-1, BLOCK)
        begin = group[0][0]
        sums[begin : begin + len(rows)] = _folded_(rows * rows)


def _groups(pieces: Iterable[Piece], limit: int) -> Iterator[list[Piece]]:
    """Neighbouring pieces of one dtype, together of `limit` blocks at most; a larger one is cut."""
    group: list[Piece] = []
    end = 0
    for first, piece in pieces:
        for number, part in enumerate(piece.split(limit * BLOCK)):
            begin = first + number * limit
            fits = begin == end and begin + _blocks(part) - group[0][0] <= limit if group else True
            if not fits or (group and part.dtype != group[0][1].dtype):
                yield group
                group = []
            group.append((begin, part))
            end = begin + _blocks(part)
    if group:
        yield group


def _blocks(part: Tensor) -> int:
    return -(-part.numel() // BLOCK)


def _laid_out(parts: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """The parts end to end in one flat tensor, each filled with zeros up to whole blocks; without a copy if it can."""
    if len(parts) == 1 and parts[0].numel() == counts[0] * BLOCK:
        return parts[0]
    flat = parts[0].new_zeros(sum(counts) * BLOCK)
    places = flat.split([count * BLOCK for count in counts])
    foreach_copy_([place[: part.numel()] for place, part in zip(places, parts, strict=True)], list(parts))
    return flat


def _folded_(rows: Tensor) -> Tensor:
    """Add up each row, whose length is a power of two, in halves; `rows` is overwritten."""
    width = rows.shape[1]
    while width > 1:
        width //= 2
        rows[:, :width].add_(rows[:, width : 2 * width])
    return rows[:, 0]
