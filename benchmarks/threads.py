"""Which operations keep their bits from 1 to 4 threads, under the limits of portable numerics.

    python -m benchmarks.threads [--quick] [--json PATH]

Each operation is computed at several shapes, twice with each number of threads. A shape has kept its bits where all
results are alike. Portable runs compute in one thread; what keeps its bits need not.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.record import record
from ddp_core.base.digests import tree_digest
from ddp_core.numerics.chains import chained, several_threads
from ddp_core.numerics.limits import LIMITS, limits_hold

THREADS = (1, 2, 3, 4)
SHAPES = 40
"""Products, and convolutions, of each kind that are drawn at random."""

Case = Callable[[], Any]
Cases = dict[str, list[Case]]


def _drawn(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(shape).standard_normal(shape, dtype=np.float32))


def _products(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of matrices: of a few shapes at the edges and of `count` at random, as rows or as columns in memory."""
    drawn = np.random.default_rng(0)
    shapes = [(8, 1024, 512), (128, 1024, 8), (5000, 64, 8), (8, 64, 5000), (700, 1, 700), (64, 2500, 96)]
    sizes = np.exp(drawn.uniform(2.1, 6.2, (count, 3))).astype(int).tolist()
    shapes += [(rows, terms, columns) for rows, terms, columns in sizes]
    for rows, terms, columns in shapes:
        left, right = _drawn(rows, terms), _drawn(terms, columns)
        yield left, right
        yield left.T.contiguous().T, right.T.contiguous().T


def _with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, result.detach() * 0.3 + 1)]


Layer = tuple[Tensor, Tensor, int, int, int]
"""Images, weight, stride, padding, groups."""


def _layers_at_random(count: int) -> Iterator[Layer]:
    drawn = np.random.default_rng(1)
    for _ in range(count):
        images, size, kernel = (int(drawn.choice(each)) for each in ((1, 3, 8, 16), (6, 9, 14, 28), (1, 3, 5, 7)))
        channels, outputs = (int(each) for each in drawn.choice((1, 3, 8, 24, 64, 96, 130), 2))
        is_depthwise, is_last = bool(drawn.random() < 0.2), bool(drawn.random() < 0.3)
        rows = _drawn(images, channels, max(size, kernel), max(size, kernel))
        layout = torch.channels_last if is_last else torch.contiguous_format
        weight = _drawn(channels, 1, kernel, kernel) if is_depthwise else _drawn(outputs, channels, kernel, kernel)
        stride = int(drawn.integers(1, 3))
        yield rows.contiguous(memory_format=layout), weight, stride, kernel // 2, channels if is_depthwise else 1


def _convolutions(count: int) -> Cases:
    """By what is computed: the result, the gradient of the images, that of the weights."""
    layers = [
        *_layers_at_random(count),
        (_drawn(8, 64, 32, 32), _drawn(64, 64, 3, 3), 1, 1, 1),
        (_drawn(8, 64, 32, 32).contiguous(memory_format=torch.channels_last), _drawn(64, 64, 3, 3), 1, 1, 1),
        (_drawn(16, 3, 64, 64), _drawn(64, 3, 7, 7), 2, 3, 1),
        (_drawn(4, 256, 8, 8), _drawn(256, 256, 3, 3), 1, 1, 1),
        (_drawn(8, 64, 16, 16), _drawn(128, 64, 1, 1), 1, 0, 1),
        (_drawn(64, 1, 8, 8), _drawn(24, 1, 3, 3), 1, 1, 1),
        (_drawn(8, 64, 16, 16), _drawn(64, 1, 3, 3), 1, 1, 64),
    ]

    def backward(layer: Layer, wanted: list[bool]) -> Any:
        images, weight, stride, padding, groups = layer
        coming = functional.conv2d(images, weight, None, stride, padding, 1, groups)
        sizes = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups, wanted)
        gradients = torch.ops.aten.convolution_backward(coming, images, weight, [0], *sizes)
        return [each for each in gradients if each is not None]

    def forward(layer: Layer) -> Tensor:
        images, weight, stride, padding, groups = layer
        return functional.conv2d(images, weight, None, stride, padding, 1, groups)

    return {
        "convolution": [partial(forward, layer) for layer in layers],
        "convolution, gradient of images": [partial(backward, layer, [True, False, False]) for layer in layers],
        "convolution, gradient of weights": [partial(backward, layer, [False, True, False]) for layer in layers],
    }


def _others() -> Cases:
    table, block, images = _drawn(1000, 1000), _drawn(64, 1000, 300), _drawn(32, 64, 32, 32)
    heads, rows = [_drawn(4, 4, 256, 32), _drawn(2, 8, 512, 64)], _drawn(640, 300)
    index = torch.from_numpy(np.random.default_rng(1).integers(0, 1000, 4096))
    weights = [_drawn(300), _drawn(64)]

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, (300,), weight, bias)

    def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.batch_norm(x, None, None, weight, bias, training=True)

    return {
        "elementwise": [partial(each, table) for each in (torch.exp, torch.tanh, functional.gelu, torch.sqrt)],
        "sum of all": [table.sum, block.mean],
        "sum over one dimension": [*(partial(block.sum, each) for each in range(3)), partial(table.sum, 0)],
        "softmax over rows": [partial(_with_gradients, partial(torch.softmax, dim=1), table)],
        "softmax over columns": [partial(_with_gradients, partial(torch.softmax, dim=0), table)],
        "log_softmax": [partial(_with_gradients, partial(torch.log_softmax, dim=1), table)],
        "layer_norm": [partial(layer_norm, rows, weights[0], weights[0])],
        "layer_norm, backward": [partial(_with_gradients, layer_norm, rows, weights[0], weights[0])],
        "batch_norm, backward": [partial(_with_gradients, batch_norm, images, weights[1], weights[1])],
        "attention, backward": [
            partial(_with_gradients, partial(functional.scaled_dot_product_attention, is_causal=True), *[each] * 3)
            for each in heads
        ],
        "embedding, backward": [lambda: _with_gradients(lambda w: functional.embedding(index, w), _drawn(1000, 64))],
        "max_pool2d, backward": [partial(_with_gradients, partial(functional.max_pool2d, kernel_size=2), images)],
        "cross_entropy, backward": [
            lambda: _with_gradients(lambda x: functional.cross_entropy(x, index[:1000]).view(1), table)
        ],
    }


def _bits(case: Case, threads: int) -> str:
    torch.set_num_threads(threads)
    try:
        with several_threads(threads):
            return tree_digest(case())
    finally:
        torch.set_num_threads(1)


def sweep(cases: Cases, threads: Sequence[int] = THREADS) -> list[dict[str, Any]]:
    """By kind of operation how many shapes were tried, and how many have kept their bits."""
    rows = []
    for name, each in cases.items():
        kept = sum(len({_bits(case, count) for count in threads for _ in range(2)}) == 1 for case in each)
        rows.append({"what": name, "tried": len(each), "kept": kept})
        print(f"{name:36}{kept:5} of {len(each)}", flush=True)
    return rows


def main() -> None:
    """Sweep and record; starts itself anew where torch was loaded without the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few products")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    if not limits_hold():
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.threads", *sys.argv[1:]], {**os.environ, **LIMITS})
    count = 2 if arguments.quick else SHAPES
    pairs = list(_products(count))
    cases: Cases = {
        "products in chains": [partial(chained, *pair) for pair in pairs],
        "products (MKL)": [partial(torch.mm, *pair) for pair in pairs],
    }
    found = sweep(cases | _convolutions(count) | _others())
    print(record("threads", "python -m benchmarks.threads", found, arguments.json, rounds=2))


if __name__ == "__main__":
    main()
