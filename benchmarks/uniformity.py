"""Is an order uniform? Chi-square tests of independence on what a shuffle could get wrong, and their p-values.

An order of n samples is a permutation: ids and positions each occur once. So a table of (class of the position) x
(class of the id) has its margins fixed. Under the null hypothesis that all permutations are equally likely, Pearson's
statistic of an a x b table follows chi-square with (a - 1)(b - 1) degrees of freedom (times n / (n - 1), a factor too
small for any test here).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

Integers = NDArray[np.int64]


def upper_tail(statistic: float, degrees: int) -> float:
    """P(X > statistic) of the chi-square distribution with `degrees` degrees of freedom."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def high_class(values: Integers, length: int, classes: int) -> Integers:
    """Which of `classes` equal stretches of [0, length) each value lies in."""
    # In floating point, as values * classes leaves 64 bits at lengths near 2**63.
    return np.minimum((values / length * classes).astype(np.int64), classes - 1)


def independence(first: Integers, second: Integers, classes: int) -> tuple[float, int]:
    """Chi-square statistic and degrees of freedom of the table of two class labels, each in [0, classes)."""
    table = np.bincount(first * classes + second, minlength=classes * classes).reshape(classes, classes)
    rows, columns = table.sum(axis=1, keepdims=True), table.sum(axis=0, keepdims=True)
    expected = rows * columns / table.sum()
    return float(((table - expected) ** 2 / expected).sum()), (classes - 1) ** 2


def pooled(tables: Iterable[tuple[float, int]]) -> float:
    """The p-value of several independent tables together: the sum of statistics against the sum of degrees."""
    statistic, degrees = 0.0, 0
    for one_statistic, one_degrees in tables:
        statistic, degrees = statistic + one_statistic, degrees + one_degrees
    return upper_tail(statistic, degrees)


def of_positions(ids: Integers, length: int, classes: int = 16) -> dict[str, tuple[float, int]]:
    """Does the id depend on the position, by size (`high`) or last digits (`low`)? `ids` are of positions in a row."""
    positions = np.arange(len(ids))
    return {
        "high": independence(high_class(positions, len(ids), classes), high_class(ids, length, classes), classes),
        "low": independence(positions % classes, ids % classes, classes),
        "low to high": independence(positions % classes, high_class(ids, length, classes), classes),
    }


def of_pairs(first: Integers, second: Integers, length: int, classes: int = 16) -> dict[str, tuple[float, int]]:
    """Does one id tell anything of another: its neighbour in the order, or its counterpart in another epoch or seed?"""
    return {
        "high": independence(high_class(first, length, classes), high_class(second, length, classes), classes),
        "low": independence(first % classes, second % classes, classes),
        "low to high": independence(first % classes, high_class(second, length, classes), classes),
    }


def correlation(first: Integers, second: Integers) -> float:
    """Pearson's r of two id sequences in standard errors, r * sqrt(n): mean 0 and variance 1 where independent."""
    return float(np.corrcoef(first, second)[0, 1] * len(first) ** 0.5)
