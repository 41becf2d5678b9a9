"""Augmentation as a function of the sample: its random numbers are arguments, keyed by (seed, epoch, sample id).

So a sample is changed in the same way on every rank, in every worker and in every micro-batch. A whole micro-batch is
changed at once, element by element, without sums over samples and without matrix products: their rounding could depend
on the other samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Augmentation:
    """`apply(inputs [n, …], uniforms float64 [n, draws] in [0, 1))` returns changed inputs [n, …].

    `inputs` are whatever the data set has, a tensor or a tree of tensors.
    """

    draws: int
    apply: Callable[[Any, NDArray[np.float64]], Any]


@dataclass(frozen=True)
class ShiftAndFlip:
    """Move each image by up to `padding` pixels, filling with zeros, and mirror half of them where `flip` is set.

    The usual "random crop with padding": the image is padded on every side, and a part of its size is cut out at a
    random place.
    Images are [n, channels, height, width]; the uniforms are row, column and, with `flip`, side.
    """

    padding: int
    flip: bool

    def __call__(self, images: Tensor, uniforms: NDArray[np.float64]) -> Tensor:
        corners = (uniforms[:, :2] * (2 * self.padding + 1)).astype(np.int64)
        padded = functional.pad(images, (self.padding,) * 4)
        return _windows(padded, corners, images.shape[2:], uniforms[:, 2] < 0.5 if self.flip else None)


def shift_and_flip(padding: int, flip: bool = False) -> Augmentation:
    """The standard augmentation of small images: random crop with padding, and a horizontal flip if asked for."""
    return Augmentation(draws=3 if flip else 2, apply=ShiftAndFlip(padding, flip))


@dataclass(frozen=True)
class CropAndFlip:
    """Take a part of `size` x `size` pixels from a random place of each image, and mirror half of them.

    Images are [n, channels, height, width], at least as large; the uniforms are row, column, side.
    """

    size: int

    def __call__(self, images: Tensor, uniforms: NDArray[np.float64]) -> Tensor:
        places = np.array(images.shape[2:]) - self.size + 1
        corners = (uniforms[:, :2] * places).astype(np.int64)
        return _windows(images, corners, (self.size, self.size), uniforms[:, 2] < 0.5)


def crop_and_flip(size: int) -> Augmentation:
    """The standard augmentation of photographs that are stored a little larger: random crop, horizontal flip."""
    return Augmentation(draws=3, apply=CropAndFlip(size))


def _windows(
    images: Tensor, corners: NDArray[np.int64], shape: Sequence[int], mirrored: NDArray[np.bool_] | None
) -> Tensor:
    """The part of each image with its upper left pixel at `corners` [n, 2] (row, column), and the `shape` given."""
    count, (height, width) = len(images), shape
    places = torch.from_numpy(corners)
    rows = places[:, 0, None] + torch.arange(height)
    columns = torch.arange(width).expand(count, width)
    if mirrored is not None:
        columns = torch.where(torch.from_numpy(mirrored)[:, None], columns.flip(1), columns)
    columns = places[:, 1, None] + columns
    chosen = images.permute(0, 2, 3, 1)[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return chosen.permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True)
class TurnShiftScale:
    """Turn, move and resize each image a little, by bilinear interpolation, zeros outside.

    `turn` is the largest shear (for small angles: radians), `shift` the largest move in pixels, `scale` the largest
    relative change of size. Images are [n, channels, height, width]; the uniforms are turn, column, row, size.
    """

    turn: float
    shift: float
    scale: float

    def __call__(self, images: Tensor, uniforms: NDArray[np.float64]) -> Tensor:
        count, _, height, width = images.shape
        turn, column, row, size = torch.from_numpy(2 * uniforms - 1).float().view(count, 4, 1, 1).unbind(1)
        # grid_sample's coordinates: -1 and 1 are the outer edges, pixel centres lie half a pixel inside.
        x = ((torch.arange(width) * 2 + 1) / width - 1).view(1, 1, width)
        y = ((torch.arange(height) * 2 + 1) / height - 1).view(1, height, 1)
        turn, size = self.turn * turn, 1 + self.scale * size
        grid = torch.stack(
            (
                size * x - turn * y + column * (2 * self.shift / width),
                turn * x + size * y + row * (2 * self.shift / height),
            ),
            dim=-1,
        )
        return functional.grid_sample(images, grid, align_corners=False)


def turn_shift_scale(turn: float = 0.1, shift: float = 0.5, scale: float = 0.1) -> Augmentation:
    """A gentle augmentation for images so small that a whole pixel matters."""
    return Augmentation(draws=4, apply=TurnShiftScale(turn, shift, scale))
