"""Products of matrices, attention and convolutions of the published table by their definition.

As in `operations`, each has the table's name, and gives what its digest is of.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from ddp_lab.probe.definition.arithmetic import fused, product_in_chains, sum_of_columns
from ddp_lab.probe.definition.inputs import Array, numbers
from ddp_lab.probe.definition.operations import COMING, Definition, fixed_weight, softmax, softmax_gradient

_FLOAT = np.float32


def _matmul(rows: int, terms: int, columns: int) -> Array:
    return product_in_chains(numbers(rows, terms), numbers(terms, columns, key=1))


def _halves(rows: int, terms: int, columns: int) -> Array:
    """The product of the numbers as float32, rounded once."""
    left, right = numbers(rows, terms, dtype=np.float16), numbers(terms, columns, key=1, dtype=np.float16)
    return product_in_chains(left.astype(_FLOAT), right.astype(_FLOAT)).astype(np.float16)


def _addmm(rows: int, terms: int, columns: int, key: int) -> Array:
    """What is added comes last, after both factors."""
    return _matmul(rows, terms, columns) * _FLOAT(2) + numbers(columns, key=key) * _FLOAT(0.5)


def _bmm(batches: int, rows: int, terms: int, columns: int) -> list[Array]:
    left, right = numbers(batches, rows, terms), numbers(batches, terms, columns, key=1)
    coming = numbers(batches, rows, columns, key=COMING)
    of_left, of_right = product_in_chains(coming, _turned(right)), product_in_chains(_turned(left), coming)
    return [product_in_chains(left, right), of_left, of_right]


def _of_groups(groups: int, rows: int, terms: int, columns: int) -> list[Array]:
    """Each group of rows has a right matrix of its own."""
    left, right = numbers(groups * rows, terms), numbers(groups, terms, columns, key=1)
    coming = numbers(groups * rows, columns, key=COMING).reshape(groups, rows, columns)
    of_group = left.reshape(groups, rows, terms)
    result, of_left = product_in_chains(of_group, right), product_in_chains(coming, _turned(right))
    return [np.concatenate(result), np.concatenate(of_left), product_in_chains(_turned(of_group), coming)]


def _baddbmm(batches: int, rows: int, terms: int, columns: int, key: int) -> Array:
    product = product_in_chains(numbers(batches, rows, terms), numbers(batches, terms, columns, key=1))
    return product + numbers(batches, rows, columns, key=key)


def _linear(rows: int, inputs: int, outputs: int) -> list[Array]:
    x, of_layer, bias = numbers(rows, inputs), fixed_weight(outputs, inputs), fixed_weight(outputs, number=1)
    coming = numbers(rows, outputs, key=COMING)
    gradients = [product_in_chains(coming.T, x), sum_of_columns(coming), product_in_chains(coming, of_layer)]
    return [product_in_chains(x, of_layer.T) + bias, *gradients]


def _attention(
    samples: int,
    heads: int,
    rows: int,
    width: int,
    keys: int | None = None,
    mask: Array | None = None,
    is_causal: bool = False,
) -> list[Array]:
    """Products, times the scale, plus the mask, without the keys that come later; their softmax; products again."""
    query, key, value = (
        numbers(samples, heads, count, width, key=each) for each, count in enumerate((rows, keys or rows, keys or rows))
    )
    coming, scale = numbers(samples, heads, rows, width, key=COMING), _FLOAT(width**-0.5)
    scores = product_in_chains(query, _turned(key)) * scale
    if mask is not None:
        scores = scores + mask
    if is_causal:
        scores = np.where(np.tri(rows, dtype=bool), scores, -_FLOAT(np.inf))
    weights = softmax(scores)
    of_scores = softmax_gradient(weights, product_in_chains(coming, _turned(value))) * scale
    of_query, of_key = product_in_chains(of_scores, key), product_in_chains(_turned(of_scores), query)
    return [product_in_chains(weights, value), of_query, of_key, product_in_chains(_turned(weights), coming)]


def _turned(matrices: Array) -> Array:
    return np.swapaxes(matrices, -2, -1)


def _convolution(images: Array, kernel: Array, bias: Array, stride: int, padding: int) -> Array:
    """One chain per pixel that begins with the bias: over eight channels within the kernel's columns and its rows.

    Then come the next eight channels.
    """
    height, width = kernel.shape[2:]
    padded = _padded(images, padding)
    rows, columns = (1 + (padded.shape[2] - height) // stride, 1 + (padded.shape[3] - width) // stride)
    chain = np.zeros((len(images), len(kernel), rows, columns), _FLOAT) + bias[:, None, None]
    channels = range(images.shape[1])
    for first, row, column in np.ndindex(-(-len(channels) // 8), height, width):
        for channel in channels[8 * first : 8 * first + 8]:
            seen = padded[:, channel, None, row:, column:][..., ::stride, ::stride][..., :rows, :columns]
            chain = fused(seen, kernel[:, channel, row, column, None, None], chain)
    return chain


def _gradient_of_weight(images: Array, coming: Array, padding: int) -> Array:
    """One chain per weight of 3 x 3: over the images, their rows and their columns."""
    padded = _padded(images, padding)
    chain = np.zeros((coming.shape[1], images.shape[1], 3, 3), _FLOAT)
    for image, row, column in np.ndindex(len(coming), *coming.shape[2:]):
        seen = padded[image, :, row : row + 3, column : column + 3]
        chain = fused(coming[image, :, row, column, None, None, None], seen, chain)
    return chain


def _padded(images: Array, padding: int) -> Array:
    return np.pad(images, ((0, 0), (0, 0), (padding, padding), (padding, padding)))


IN_CHAINS: Mapping[str, Definition] = {
    **{
        f"matmul {rows}x{terms}x{columns}": partial(_matmul, rows, terms, columns)
        for rows, terms, columns in ((37, 53, 41), (128, 256, 64), (8, 1000, 8), (300, 16, 300))
    },
    "matmul of transposed": lambda: product_in_chains(numbers(53, 37).T, numbers(41, 53, key=1).T),
    "matmul float16": partial(_halves, 37, 53, 41),
    "mm of three chains": partial(_matmul, 64, 2500, 96),
    "mm of seven rows": partial(_matmul, 7, 500, 400),
    "mm of transposed, in chains": lambda: product_in_chains(numbers(160, 96).T, numbers(128, 160, key=1).T),
    "mm of parts, in chains": lambda: product_in_chains(numbers(192, 320)[::2, ::2], numbers(160, 256, key=1)[:, 1::2]),
    "mm float16, in chains": partial(_halves, 96, 160, 128),
    "addmm": partial(_addmm, 37, 53, 41, key=0),
    "addmm, in chains": partial(_addmm, 96, 160, 128, key=2),
    "bmm, backward": partial(_bmm, 5, 17, 23, 11),
    "bmm of small": lambda: product_in_chains(numbers(64, 4, 4), numbers(64, 4, 4, key=1)),
    "bmm, in chains, backward": partial(_bmm, 3, 64, 144, 128),
    "products of groups of rows, backward": partial(_of_groups, 3, 8, 16, 8),
    "baddbmm": partial(_baddbmm, 5, 17, 23, 11, key=0),
    "baddbmm, in chains": partial(_baddbmm, 3, 64, 144, 128, key=2),
    "linear, backward": partial(_linear, 17, 65, 33),
    "linear of one sample, backward": partial(_linear, 1, 65, 33),
    "linear to one output, backward": partial(_linear, 8, 10, 1),
    "linear, in chains, backward": partial(_linear, 96, 160, 128),
    "attention, backward": partial(_attention, 2, 4, 19, 16),
    "causal attention, backward": partial(_attention, 2, 4, 19, 16, is_causal=True),
    "attention with a mask, backward": lambda: _attention(2, 4, 19, 16, mask=numbers(19, 19, key=9)),
    "attention of 1,100 queries, backward": partial(_attention, 1, 1, 1100, 8, keys=40),
    "conv2d 3x3": lambda: _convolution(
        numbers(4, 6, 9, 9), fixed_weight(11, 6, 3, 3), fixed_weight(11, number=1), 1, 1
    ),
    "conv2d 3x3 of 64 channels": lambda: _convolution(
        numbers(2, 64, 8, 8), fixed_weight(64, 64, 3, 3), np.zeros(64, _FLOAT), 1, 1
    ),
    "conv2d 7x7 with stride": lambda: _convolution(
        numbers(2, 3, 32, 32), fixed_weight(64, 3, 7, 7), np.zeros(64, _FLOAT), 2, 3
    ),
    "conv2d, gradient of weights": lambda: _gradient_of_weight(
        numbers(2, 64, 8, 8), numbers(2, 64, 8, 8, key=COMING), 1
    ),
}
"""Products of matrices, and what is made of them."""
