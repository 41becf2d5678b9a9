"""Figures of runs side by side: which have a column, and mean and deviation where runs differ in their seed alone."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ddp_core.config.experiment import UNTRAINED
from ddp_core.config.records import dotted

_NAMES = ("train_loss", "test_", "ema_test_")
_NO_FAMILY = ("seed", UNTRAINED)
"""Settings in which runs of one family may differ."""
PREFIX = "test_"
"""How the names of figures of an evaluation begin."""
MOST = 4
"""How many of its own figures a table has room for; `run.json` has all."""


class Figure(NamedTuple):
    """One figure of the results, over the seeds."""

    name: str
    runs: int
    mean: float
    deviation: float
    """The standard deviation of a single run (with n - 1)."""

    @property
    def words(self) -> str:
        """`0.9912 ± 0.0012 (5)`: mean, standard deviation with two digits, and the number of seeds."""
        if self.deviation == 0 or not math.isfinite(self.deviation):
            form = ".4g"
        else:
            form = f".{max(0, 1 - math.floor(math.log10(self.deviation)))}f"
        return f"{self.mean:{form}} ± {self.deviation:{form}} ({self.runs})"


class OverSeeds(NamedTuple):
    """What the runs of one experiment with several seeds have ended with."""

    seeds: list[int]
    figures: list[Figure]
    left_out: int
    """How many completed runs were trained from something else than these, or with other numerics."""

    def table(self, name: str) -> str:
        """A line for each figure: mean ± standard deviation (n)."""
        seeds = ", ".join(map(str, self.seeds))
        head = f"{name} over the seeds {seeds}: mean ± standard deviation (n){self.others}"
        width = max((len(figure.name) for figure in self.figures), default=0)
        rows = [f"{each.name.replace('_', ' '):{width}}  {each.words}" for each in self.figures]
        return "\n".join([head, *rows, ""])

    @property
    def others(self) -> str:
        """What is said of the runs that are left out; empty where there are none."""
        other = "code or data or parents or initial weights or numerics"
        return f"; left out, of other {other}: {self.left_out}" if self.left_out else ""

    @property
    def facts(self) -> dict[str, Any]:
        """The figures in plain JSON types."""
        figures = {figure.name: figure._asdict() for figure in self.figures}
        return {"seeds": self.seeds, "left_out": self.left_out, "figures": figures}


def origin_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The digests of what decides the weights of a run, beside its settings."""
    return {
        "code": (record.get("source") or {}).get("files"),
        "data": record.get("data_sha256"),
        "parents": (record.get("forked_from") or {}).get("weights_sha256"),
        "initial weights": (record.get("init_from") or {}).get("sha256"),
    }


def family_of(record: Mapping[str, Any]) -> str:
    """A text that is the same for the records of runs that differ in their seed, or not at all."""
    settings = {name: value for name, value in dotted(record["experiment"]).items() if name not in _NO_FAMILY}
    return json.dumps(settings, sort_keys=True)


def over_seeds(records: Iterable[Mapping[str, Any]]) -> OverSeeds | None:
    """The figures of the completed runs of one family, of each seed the first one; None for fewer than two seeds.

    Where they are not all of the same origin and numerics, those alike with most seeds count. A figure that a run does
    not have, or not as a finite number, is left out of the others.
    """
    alike: dict[str, dict[int, Mapping[str, Any]]] = {}
    runs = Counter[str]()
    for record in records:
        seed, fingerprint = record["experiment"].get("seed"), record["fingerprint"]
        if record["status"] == "completed" and seed is not None:
            of = json.dumps([origin_of(record), fingerprint.get("numerics_rules")], sort_keys=True)
            alike.setdefault(of, {}).setdefault(seed, record["result"])
            runs[of] += 1
    most = max(alike, key=lambda of: len(alike[of]), default="")
    by_seed = alike.get(most, {})
    if len(by_seed) < 2:
        return None
    names = dict.fromkeys(name for result in by_seed.values() for name in result if name.startswith(_NAMES))
    figures = []
    for name in names:
        found = [result.get(name) for result in by_seed.values()]
        values = [value for value in found if isinstance(value, int | float) and math.isfinite(value)]
        if len(values) == len(found):
            figures.append(Figure(name, len(values), statistics.fmean(values), statistics.stdev(values)))
    return OverSeeds(sorted(by_seed), figures, runs.total() - runs[most])


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
