"""Augmentation as a function of the sample: its random numbers are arguments, keyed by (seed, epoch, sample id).

So a sample is changed in the same way on every rank, in every worker and in every micro-batch. A whole micro-batch is
changed at once, element by element, without sums over samples and without matrix products: their rounding could depend
on the other samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

Uniforms = Tensor | NDArray[np.float64]
"""Random numbers in [0, 1), float64 [n, draws]."""


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


def shift_and_flip(padding: int, flip: bool = False) -> Augmentation:
    """The standard augmentation of small images: random crop with padding, and a horizontal flip if asked for.

    Each image [channels, height, width] is padded with zeros on every side, and a part of the image's size is cut out
    at a random place: it moves by up to `padding` pixels. With `flip`, half of the images are mirrored.
    """
    return Augmentation(3 if flip else 2, partial(_cropped, padding=padding, flip=flip), on_device=True)


def crop_and_flip(size: int) -> Augmentation:
    """The standard augmentation of photographs that are stored a little larger: random crop, horizontal flip.

    A part of `size` x `size` pixels is taken from a random place of each image [channels, height, width], and half of
    these parts are mirrored.
    """
    return Augmentation(3, partial(_cropped, size=size, flip=True), on_device=True)


def turn_shift_scale(turn: float = 0.1, shift: float = 0.5, scale: float = 0.1) -> Augmentation:
    """A gentle augmentation for images so small that a whole pixel matters: each is turned, moved and resized a little.

    `turn` is the largest shear (for small angles: radians), `shift` the largest move in pixels, `scale` the largest
    relative change of size. Values are interpolated bilinearly, with zeros outside of the image: the same as torch's
    `grid_sample` up to rounding, but made of operations whose results IEEE 754 fixes to the last bit, so that every
    processor has the same.
    """
    return Augmentation(4, partial(_turned, turn=turn, shift=shift, scale=scale), on_device=True)


def _cropped(images: Tensor, uniforms: Uniforms, flip: bool, padding: int = 0, size: int | None = None) -> Tensor:
    """A part of each image: `size` each way, or as large as the image was before it was padded with zeros.

    The uniforms are row, column and, with `flip`, side.
    """
    numbers, device = torch.as_tensor(uniforms, device=images.device), images.device
    count, (height, width) = len(images), images.shape[2:] if size is None else (size, size)
    if padding:
        images = functional.pad(images, (padding,) * 4)
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


def _turned(images: Tensor, uniforms: Uniforms, turn: float, shift: float, scale: float) -> Tensor:
    """Each image turned, moved and resized; the uniforms are turn, column, row and size."""
    count, channels, height, width = images.shape
    numbers = 2 * torch.as_tensor(uniforms, device=images.device) - 1
    angle, column, row, size = numbers.float().view(count, 4, 1, 1).unbind(1)
    angle, size = turn * angle, 1 + scale * size
    # How far each pixel lies from the middle of its image, and from which place of the image it takes its value.
    across = (torch.arange(width, device=images.device) - (width - 1) / 2).view(1, 1, width)
    down = (torch.arange(height, device=images.device) - (height - 1) / 2).view(1, height, 1)
    x = size * across - angle * down + (shift * column + (width - 1) / 2)
    y = size * down + angle * across + (shift * row + (height - 1) / 2)
    # The values there, from the four pixels around.
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
