"""Which figures of an evaluation are shown where runs stand side by side: accuracy, and the experiment's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

PREFIX = "test_"
MOST = 4
"""How many of them a table has room for; `run.json` has all."""


def own_figures(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of the single numbers, beside the loss, in the results of runs; accuracy first, then as they stand."""
    names = dict.fromkeys(
        name
        for result in results
        for name, value in result.items()
        if name.startswith(PREFIX) and isinstance(value, int | float) and not isinstance(value, bool)
    )
    return sorted(names.keys() - {"test_loss"}, key=lambda name: (name != "test_accuracy", [*names].index(name)))


def in_words(name: str) -> str:
    """A figure's name as a heading has it: `test_mean_f1` is mean f1."""
    return name.removeprefix(PREFIX).replace("_", " ")
