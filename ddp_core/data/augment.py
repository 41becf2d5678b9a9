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

    `inputs` are whatever the data set has, a tensor or a tree of tensors, and lie on the CPU; the uniforms are a numpy
    array. With `on_device`, which is faster on a GPU, the inputs lie on the device that trains, and the uniforms are a
    tensor there.
    """

    draws: int
    apply: Callable[[Any, Any], Any]
    on_device: bool = False


@dataclass(frozen=True)
class ShiftAndFlip:
    """Move each image by up to `padding` pixels, filling with zeros, and mirror half of them where `flip` is set.

    The usual "random crop with padding": the image is padded on every side, and a part of the image's size is cut out
    at a random place. Images are [n, channels, height, width]; the uniforms are row, column and, with `flip`, side.
    """

    padding: int
    flip: bool

    def __call__(self, images: Tensor, uniforms: Tensor | NDArray[np.float64]) -> Tensor:
        padded = functional.pad(images, (self.padding,) * 4)
        return _cropped(padded, images.shape[2:], uniforms, self.flip)


def shift_and_flip(padding: int, flip: bool = False) -> Augmentation:
    """The standard augmentation of small images: random crop with padding, and a horizontal flip if asked for."""
    return Augmentation(draws=3 if flip else 2, apply=ShiftAndFlip(padding, flip), on_device=True)


@dataclass(frozen=True)
class CropAndFlip:
    """Take a part of `size` x `size` pixels from a random place of each image, and mirror half of them.

    Images are [n, channels, height, width], at least as large; the uniforms are row, column, side.
    """

    size: int

    def __call__(self, images: Tensor, uniforms: Tensor | NDArray[np.float64]) -> Tensor:
        return _cropped(images, (self.size, self.size), uniforms, flip=True)


def crop_and_flip(size: int) -> Augmentation:
    """The standard augmentation of photographs that are stored a little larger: random crop, horizontal flip."""
    return Augmentation(draws=3, apply=CropAndFlip(size), on_device=True)


def _cropped(images: Tensor, shape: Sequence[int], uniforms: Tensor | NDArray[np.float64], flip: bool) -> Tensor:
    """A part of each image, of the height and width in `shape`, from a random place, with `flip` mirrored by chance."""
    numbers, device = torch.as_tensor(uniforms, device=images.device), images.device
    count, (height, width) = len(images), shape
    top = (numbers[:, 0] * (images.shape[2] - height + 1)).long()
    left = (numbers[:, 1] * (images.shape[3] - width + 1)).long()
    rows = top[:, None] + torch.arange(height, device=device)
    columns = torch.arange(width, device=device).expand(count, width)
    if flip:
        columns = torch.where(numbers[:, 2:3] < 0.5, columns.flip(1), columns)
    columns = left[:, None] + columns
    every = torch.arange(count, device=device)
    chosen = images.permute(0, 2, 3, 1)[every[:, None, None], rows[:, :, None], columns[:, None, :]]
    return chosen.permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True)
class TurnShiftScale:
    """Turn, move and resize each image a little, by bilinear interpolation, zeros outside.

    `turn` is the largest shear (for small angles: radians), `shift` the largest move in pixels, `scale` the largest
    relative change of size. Images are [n, channels, height, width]; the uniforms are turn, column, row, size. The same
    as torch's `grid_sample` up to rounding, but made of operations whose results IEEE 754 fixes to the last bit: every
    processor has the same.
    """

    turn: float
    shift: float
    scale: float

    def __call__(self, images: Tensor, uniforms: Tensor | NDArray[np.float64]) -> Tensor:
        count, _, height, width = images.shape
        numbers = 2 * torch.as_tensor(uniforms, device=images.device) - 1
        turn, column, row, size = numbers.float().view(count, 4, 1, 1).unbind(1)
        turn, size = self.turn * turn, 1 + self.scale * size
        # How far each pixel lies from the middle of its image, and from which place of the image it takes its value.
        across = (torch.arange(width, device=images.device) - (width - 1) / 2).view(1, 1, width)
        down = (torch.arange(height, device=images.device) - (height - 1) / 2).view(1, height, 1)
        x = size * across - turn * down + (self.shift * column + (width - 1) / 2)
        y = size * down + turn * across + (self.shift * row + (height - 1) / 2)
        return _between_pixels(images, x, y)


def _between_pixels(images: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The images' values at columns `x` and rows `y` (float32 [n, height, width] each), from the four pixels around."""
    count, channels, height, width = images.shape
    # Whatever lies outside falls among these zeros: one on the left, two on the right of the pixel before it.
    padded = functional.pad(images, (1, 2, 1, 2)).view(count, channels, -1)
    x, y = x.clamp(-1, width), y.clamp(-1, height)
    left, top = x.floor(), y.floor()
    corner = ((top.long() + 1) * (width + 3) + (left.long() + 1)).view(count, 1, -1)
    step = torch.arange(2, device=images.device)
    around = (step[:, None] * (width + 3) + step).view(4, 1)
    places = (corner + around).view(count, 1, -1).expand(-1, channels, -1)
    corners = padded.gather(2, places).view(count, channels, 2, 2, height, width)
    near, far = corners.unbind(3)
    above, below = (near + (far - near) * (x - left).view(count, 1, 1, height, width)).unbind(2)
    return above + (below - above) * (y - top).view(count, 1, height, width)


def turn_shift_scale(turn: float = 0.1, shift: float = 0.5, scale: float = 0.1) -> Augmentation:
    """A gentle augmentation for images so small that a whole pixel matters."""
    return Augmentation(draws=4, apply=TurnShiftScale(turn, shift, scale), on_device=True)
