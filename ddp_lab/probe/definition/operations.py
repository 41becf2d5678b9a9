"""Operations of the published table by their definition; each has the table's name, and gives what its digest is of.

Weights and biases are `fixed_weight`, and what backward begins with are numbers by the key `COMING`, as in the probe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from ddp_lab.probe.definition.arithmetic import (
    cascaded,
    fused,
    in_turn,
    reduced,
    sum_of_columns,
    sum_of_rows,
)
from ddp_lab.probe.definition.inputs import Array, integers, numbers, positive

Definition = Callable[[], list[Array] | Array]

_FLOAT = np.float32
_LENGTH = 1003
COMING = 99
_EPSILON = 1e-5


def fixed_weight(*shape: int, number: int = 0) -> Array:
    return numbers(*shape, key=50 + number, scale=0.25)


def _exponential(x: Array) -> Array:
    """exp as softmax and cross entropy have it: SLEEF's polynomial of degree 6 (https://sleef.org, `xexpf`)."""
    x = np.maximum(x, _FLOAT(-200))  # whose exponential is 0, as that of minus infinity
    power = np.rint(x * _FLOAT(1.442695040888963407))
    rest = fused(power, _FLOAT(-1.428606765330187045e-06), fused(power, _FLOAT(-0.693145751953125), x))
    sum_ = np.full_like(rest, 0.000198527617612853646278381)
    for factor in (
        0.00139304355252534151077271,
        0.00833336077630519866943359,
        0.0416664853692054748535156,
        0.166666671633720397949219,
        0.5,
    ):
        sum_ = fused(sum_, rest, _FLOAT(factor))
    return np.ldexp(_FLOAT(1) + fused(rest * rest, sum_, rest), power.astype(np.int32))


def _logarithm(x: Array) -> Array:
    """log as torch 2.13 has it, here: the nearest number."""
    return np.log(x.astype(np.float64)).astype(_FLOAT)


def _arithmetic() -> list[Array]:
    wide, above = numbers(_LENGTH, scale=8), positive(_LENGTH, scale=64)
    return [wide + above, wide * above, wide / above]


def _of_each(function: Callable[[Array], Array], x: Array) -> list[Array]:
    return [function(x), function(x[:3])]


def _relu() -> list[Array]:
    x, coming = numbers(_LENGTH, scale=8), numbers(_LENGTH, key=COMING)
    return [np.maximum(x, 0), np.where(x > 0, coming, _FLOAT(0))]


def _sqrt_backward() -> list[Array]:
    x, coming = positive(_LENGTH, scale=64), numbers(_LENGTH, key=COMING)
    root = np.sqrt(x)
    return [root, coming / (root * 2)]


def _sum() -> list[Array]:
    long, table = numbers(20_011), numbers(137, 211)
    return [
        sum_of_rows(long),
        sum_of_columns(table),
        sum_of_rows(table),
        sum_of_rows(numbers(20_011, dtype=np.float64)),
    ]


def _mean() -> list[Array]:
    """The sum, divided by how many numbers there are."""
    long, table = numbers(20_011), numbers(137, 211)
    return [sum_of_rows(long) / _FLOAT(20_011), sum_of_columns(table) / _FLOAT(137), sum_of_rows(table) / _FLOAT(211)]


def softmax(x: Array) -> Array:
    """The exponentials of what each row has less than its greatest number, times one over their sum."""
    powers = _exponential(x - x.max(-1, keepdims=True))
    return np.asarray(powers * (_FLOAT(1) / reduced(powers))[..., None])


def softmax_gradient(result: Array, coming: Array) -> Array:
    """What has come, less the sum of what has come times the result, times the result."""
    return np.asarray((coming - reduced(coming, result)[..., None]) * result)


def _softmax() -> list[Array]:
    result, coming = softmax(numbers(31, 67, scale=8)), numbers(31, 67, key=COMING)
    return [result, softmax_gradient(result, coming)]


def _log_softmax_of(x: Array) -> Array:
    shifted = x - x.max(1, keepdims=True)
    return np.asarray(shifted - _logarithm(reduced(_exponential(shifted)))[:, None])


def _log_softmax_gradient(result: Array, coming: Array) -> Array:
    return fused(-_exponential(result), reduced(coming)[:, None], coming)


def _log_softmax() -> list[Array]:
    result, coming = _log_softmax_of(numbers(31, 67, scale=8)), numbers(31, 67, key=COMING)
    return [result, _log_softmax_gradient(result, coming)]


def _cross_entropy() -> list[Array]:
    """The mean over the samples of the cascaded sum of minus the logarithms."""
    logits, classes, count = numbers(33, 10, scale=8), integers(33, below=10, key=1), _FLOAT(33)
    result, rows = _log_softmax_of(logits), np.arange(33)
    coming = np.zeros_like(logits)
    coming[rows, classes] = -(numbers(key=COMING) / count)
    return [cascaded(-result[rows, classes]) / count, _log_softmax_gradient(result, coming)]


def _mse_loss() -> list[Array]:
    difference = numbers(999, scale=4) - numbers(999, key=1)
    gradient = _FLOAT(2 / 999) * difference * numbers(key=COMING)
    return [sum_of_rows(difference * difference) / _FLOAT(999), gradient]


def _moments(x: Array) -> tuple[Array, Array]:
    """Mean and sum of squared distances from it of each row, below 129 numbers long, by Welford's updates.

    Each lane of a register has its own, over every eighth number; then come the numbers that fill no register, and
    last the lanes are joined to these in turn.
    """
    count = x.shape[1] // 8
    mean = squares = np.zeros((len(x), 8), _FLOAT)
    for number, register in enumerate(np.moveaxis(x[:, : 8 * count].reshape(len(x), count, 8), 1, 0), start=1):
        distance = register - mean
        mean = fused(distance, _FLOAT(1) / _FLOAT(number), mean)
        squares = fused(distance, register - mean, squares)
    seen, joined, total = 0, np.zeros(len(x), _FLOAT), np.zeros(len(x), _FLOAT)
    for column in x[:, 8 * count :].T:
        seen += 1
        distance = column - joined
        joined = joined + distance / _FLOAT(seen)
        total = fused(distance, column - joined, total)
    for lane_mean, lane_squares in zip(mean.T, squares.T, strict=True):
        share, distance = _FLOAT(count) / _FLOAT(seen + count), lane_mean - joined
        joined = fused(share, distance, joined)
        total = total + fused(distance * distance * share, _FLOAT(seen), lane_squares)
        seen += count
    return joined, total


def _layer_norm() -> list[Array]:
    x, coming, weight, bias = numbers(31, 65), numbers(31, 65, key=COMING), fixed_weight(65), fixed_weight(65, number=1)
    mean, squares = (each[:, None] for each in _moments(x))
    scale = _FLOAT(1) / np.sqrt(squares / _FLOAT(65) + _FLOAT(_EPSILON))
    result = fused((x - mean) * scale, weight, bias)
    # The gradient of the weight is one chain over the rows.
    of_weight = np.zeros_like(weight)
    for row, coming_row, of_mean, of_scale in zip(x, coming, mean, scale, strict=True):
        of_weight = fused(coming_row, fused(of_scale, row, -of_scale * of_mean), of_weight)
    along, alone = reduced(coming, x, weight)[:, None], reduced(coming, weight)[:, None]
    share = _FLOAT(1) / _FLOAT(65)
    factor = (alone * mean - along) * scale * scale * scale * share
    constant = fused(-factor, mean, -(alone * scale * share))
    of_x = fused(factor, x, scale * coming * weight) + constant
    return [result, of_weight, in_turn(coming), of_x]


def _batch_norm() -> list[Array]:
    """Mean, variance and the sums of backward are added in float64, one after the other."""
    images, weight, bias = numbers(8, 6, 7, 9, scale=4).reshape(8, 6, 63), fixed_weight(6), fixed_weight(6, number=1)
    coming, count = numbers(8, 6, 7, 9, key=COMING).reshape(8, 6, 63), 8 * 63
    of_channel = np.moveaxis(images, 1, 2).reshape(count, 6).astype(np.float64)
    exact_mean = in_turn(of_channel) / count
    variance = in_turn((of_channel - exact_mean) ** 2) / count
    mean, scale = (each.astype(_FLOAT)[:, None] for each in (exact_mean, 1 / np.sqrt(variance + _EPSILON)))
    slope = scale * weight[:, None]
    result = fused(images, slope, bias[:, None] - mean * slope)
    # Each image's part is a sum of float32 in eight lanes (`reduced`).
    distance = images - mean
    of_bias = in_turn(reduced(coming).astype(np.float64))
    along = in_turn(reduced(distance, coming).astype(np.float64))
    factor = along.astype(_FLOAT)[:, None] * scale * scale / _FLOAT(count)
    of_mean = (of_bias / count).astype(_FLOAT)[:, None]
    of_images = fused(-distance, factor, coming - of_mean) * scale * weight[:, None]
    running = [_FLOAT(0.1) * mean[:, 0], (0.1 * (variance * count / (count - 1)) + 0.9).astype(_FLOAT)]
    of_weight = (along * scale[:, 0]).astype(_FLOAT)
    shape = (8, 6, 7, 9)
    gradients = [of_weight, of_bias.astype(_FLOAT), of_images.reshape(shape)]
    return [result.reshape(shape), *gradients, *running, np.array(1, np.int64)]


def _sgd() -> list[Array]:
    """Weight decay, Nesterov's momentum and the update are fused multiply-adds; the momentum's own is not."""
    weights, momenta = [], []
    for size in (1, 37, 1000):
        weight, momentum = numbers(size, key=size), None
        for step in range(3):
            gradient = fused(weight, _FLOAT(5e-4), numbers(size, key=10 + step))
            momentum = gradient if momentum is None else momentum * _FLOAT(0.9) + gradient
            weight = fused(fused(momentum, _FLOAT(0.9), gradient), _FLOAT(-0.1), weight)
        weights.append(weight)
        momenta.append(momentum)
    return weights + momenta  # type: ignore[operator]


def _adam(beta2: float = 0.999, weight_decay: float = 0.0) -> list[Array]:
    """With weight_decay it is AdamW. What depends on the step alone is computed in float64, and rounded."""
    rate, beta1 = 0.01, 0.9
    weights: list[Array] = []
    states: list[Array] = []
    for size in (1, 37, 1000):
        weight, first, second = numbers(size, key=size), np.zeros(size, _FLOAT), np.zeros(size, _FLOAT)
        for step in range(1, 4):
            gradient = numbers(size, key=9 + step)
            weight = weight * _FLOAT(1 - rate * weight_decay)
            first = fused(_FLOAT(1 - beta1), gradient - first, first)
            second = fused(_FLOAT(1 - beta2) * gradient, gradient, second * _FLOAT(beta2))
            scale = np.sqrt(second) / _FLOAT(math.sqrt(1 - beta2**step)) + _FLOAT(1e-8)
            weight = weight + _FLOAT(-rate / (1 - beta1**step)) * first / scale
        weights.append(weight)
        states += [np.array(3, _FLOAT), first, second]
    return weights + states


WITHOUT_PRODUCTS: Mapping[str, Definition] = {
    "add, multiply, divide": _arithmetic,
    "abs": lambda: _of_each(np.abs, numbers(_LENGTH, scale=8)),
    "square": lambda: _of_each(np.square, numbers(_LENGTH, scale=8)),
    "reciprocal": lambda: _of_each(np.reciprocal, numbers(_LENGTH, scale=8)),
    "sqrt": lambda: _of_each(np.sqrt, positive(_LENGTH, scale=64)),
    "sqrt float64": lambda: np.sqrt(positive(_LENGTH, scale=64, dtype=np.float64) + 2.0**-40),
    "sqrt, backward": _sqrt_backward,
    "relu, backward": _relu,
    "outer": lambda: np.outer(numbers(37), numbers(41, key=1)),
    "sum": _sum,
    "mean": _mean,
    "softmax, backward": _softmax,
    "log_softmax, backward": _log_softmax,
    "cross_entropy, backward": _cross_entropy,
    "mse_loss, backward": _mse_loss,
    "layer_norm, backward": _layer_norm,
    "batch_norm, backward": _batch_norm,
    **dict.fromkeys(("SGD loop", "SGD foreach"), _sgd),
    **dict.fromkeys(("Adam loop", "Adam foreach"), _adam),
    **dict.fromkeys(("AdamW loop", "AdamW foreach"), partial(_adam, 0.99, 0.1)),
}
"""All but products and what is made of them."""
