"""Operations that move numbers (indexing, sorting, padding), pool them, or interpolate between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_lab.probe.operations.inputs import Operations, backward, integers, numbers


def moving() -> Operations:
    """Indexing, sorting, padding."""
    table, rows, places = partial(numbers, 50, 33), integers(77, below=50), integers(9, 33, below=50, key=1)
    differentiated: dict[str, tuple[Any, ...]] = {
        "embedding": (nn.Embedding(50, 33), rows),
        "embedding_bag": (nn.EmbeddingBag(50, 33, mode="mean"), rows.view(11, 7)),
        "gather": (lambda x: x.gather(0, places), table()),
        "index_select": (lambda x: x.index_select(0, rows), table()),
        "indexing by tensors": (lambda x: x[rows[:, None], integers(1, 5, below=33)], table()),
        "pad by reflection": (lambda x: functional.pad(x, (2, 3, 1, 2), mode="reflect"), numbers(2, 3, 7, 9)),
    }
    return backward(differentiated) | {
        "take": lambda: table().take(integers(999, below=1650)),
        "index_add": lambda: torch.zeros(50, 33).index_add(0, rows, numbers(77, 33)),
        "scatter_add": lambda: torch.zeros(50, 33).scatter_add(0, places, numbers(9, 33)),
        "index_put accumulated": lambda: torch.zeros(50).index_put((rows,), numbers(77), accumulate=True),
        "scatter_reduce mean": lambda: torch.zeros(50, 33).scatter_reduce(0, places, numbers(9, 33), "mean"),
        "masked_select, masked_fill": lambda: [table()[table() > 0], table().masked_fill(table() > 0, 3.0)],
        "sort, argsort, topk": lambda: [table().sort(1), numbers(1003).argsort(), numbers(1003).topk(17)],
        "unique": lambda: torch.unique(rows, return_inverse=True, return_counts=True),
        "cat, stack, roll, flip": lambda: [torch.cat([table(), table()]), table().roll(3, 1), table().flip(0)],
        "searchsorted": lambda: torch.searchsorted(numbers(99).sort()[0], numbers(33, key=1)),
        "unfold, fold": lambda: functional.fold(functional.unfold(numbers(2, 3, 8, 8), 3), (8, 8), 3),
        "pixel_shuffle": lambda: functional.pixel_shuffle(numbers(2, 8, 5, 5), 2),
        "strided copies": lambda: [numbers(31, 17, 5).permute(2, 0, 1).contiguous(), table().T[::2].clone()],
        "conversions": lambda: [table().double(), table().bfloat16(), table().half(), (table() * 99).int()],
    }


def pooling() -> Operations:
    """Pooling and interpolation, forward and backward."""
    images = partial(numbers, 3, 5, 12, 15)
    functions: dict[str, Callable[..., Tensor]] = {
        "max_pool2d": partial(functional.max_pool2d, kernel_size=2),
        "max_pool2d with overlap": partial(functional.max_pool2d, kernel_size=3, stride=2, padding=1),
        "avg_pool2d": partial(functional.avg_pool2d, kernel_size=3, stride=2, padding=1),
        "adaptive_avg_pool2d": partial(functional.adaptive_avg_pool2d, output_size=(5, 4)),
        "adaptive_avg_pool2d to one": partial(functional.adaptive_avg_pool2d, output_size=1),
        "adaptive_max_pool2d": partial(functional.adaptive_max_pool2d, output_size=(5, 4)),
        "max_pool2d channels_last": lambda x: functional.max_pool2d(x.contiguous(memory_format=torch.channels_last), 2),
        "lp_pool2d": lambda x: functional.lp_pool2d(x, 2, 3),
        "interpolate nearest": partial(functional.interpolate, scale_factor=2.0),
        "interpolate bilinear": partial(functional.interpolate, size=(19, 23), mode="bilinear", align_corners=False),
        "interpolate bilinear antialias": partial(
            functional.interpolate, size=(7, 9), mode="bilinear", align_corners=False, antialias=True
        ),
        "interpolate bicubic": partial(functional.interpolate, size=(19, 23), mode="bicubic", align_corners=False),
        "interpolate area": partial(functional.interpolate, size=(7, 9), mode="area"),
    }
    differentiated: dict[str, tuple[Any, ...]] = {name: (function, images()) for name, function in functions.items()}
    for mode in ("bilinear", "nearest", "bicubic"):
        sampled = partial(functional.grid_sample, mode=mode, align_corners=False)
        differentiated[f"grid_sample {mode}"] = (sampled, images(), numbers(3, 6, 7, 2, key=1))
    differentiated["avg_pool1d"] = (lambda x: functional.avg_pool1d(x, 3), numbers(3, 5, 31))
    return backward(differentiated) | {
        "affine_grid": lambda: functional.affine_grid(numbers(3, 2, 3), [3, 5, 12, 15], align_corners=False),
    }
