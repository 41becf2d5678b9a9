"""Random numbers from torch's and numpy's generators, and functions of numpy that the project's data sets use."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ddp_lab.probe.operations.inputs import Operations, numbers, positive, seeded, words


def drawing() -> Operations:
    """Random numbers of torch, each from a generator with a fixed seed."""
    drawn = {
        "rand": lambda: [torch.rand(1003), torch.rand(5), torch.rand(100, dtype=torch.float64)],
        "randn": lambda: [torch.randn(1003), torch.randn(5), torch.randn(100, dtype=torch.float64)],
        "randint, randperm": lambda: [torch.randint(0, 1000, (99,)), torch.randperm(999)],
        "bernoulli": lambda: torch.bernoulli(positive(999)),
        "dropout": lambda: functional.dropout(numbers(1003), 0.4),
        "dropout2d": lambda: functional.dropout2d(numbers(3, 33, 4, 4), 0.4),
        "multinomial": lambda: torch.multinomial(positive(7, 31), 5),
        "exponential_": lambda: torch.empty(999).exponential_(),
        "log_normal_": lambda: torch.empty(999).log_normal_(),
        "cauchy_, geometric_": lambda: [torch.empty(99).cauchy_(), torch.empty(99).geometric_(0.3)],
        "poisson": lambda: torch.poisson(positive(999, scale=8)),
        "gamma": lambda: torch.distributions.Gamma(positive(99, scale=8), positive(99, key=1)).sample(),
        "kaiming_uniform_": lambda: nn.init.kaiming_uniform_(torch.empty(33, 17)),
        "kaiming_normal_": lambda: nn.init.kaiming_normal_(torch.empty(33, 17)),
        "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(33, 17)),
        "orthogonal_": lambda: nn.init.orthogonal_(torch.empty(33, 17)),
        "initial weights of layers": lambda: [
            parameter.detach()
            for layer in (nn.Linear(33, 17), nn.Conv2d(3, 5, 3), nn.LSTM(3, 5))
            for parameter in layer.parameters()
        ],
    }
    return {name: partial(seeded, function) for name, function in drawn.items()}


def of_numpy() -> Operations:
    """Functions of numpy."""
    x = numbers(1003, scale=8).numpy()
    above = positive(1003, scale=64).numpy()
    wide = (words(1003) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def generator() -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(1))

    return {
        "numpy: standard_normal": lambda: [
            generator().standard_normal(1003, dtype=np.float32),
            generator().standard_normal(1003),
        ],
        "numpy: integers, permutation, random": lambda: [
            generator().integers(0, 1000, 99),
            generator().permutation(999),
            generator().random(99),
        ],
        "numpy: sqrt": lambda: [np.sqrt(above), np.sqrt(wide)],
        "numpy: sum, mean, std": lambda: [x.sum(), x.mean(), x.std(), wide.sum(), wide.std()],
        "numpy: unique": lambda: np.unique(x.astype(np.int64)),
    }
