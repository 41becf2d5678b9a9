"""The figures of runs that differ in their seed alone: mean, standard deviation, and an interval of the mean."""

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
_COVERAGE = 0.95
_NO_FAMILY = ("seed", UNTRAINED)
"""Settings in which runs of one family may differ."""


class Figure(NamedTuple):
    """One figure of the results, over the seeds."""

    name: str
    runs: int
    mean: float
    deviation: float
    """The standard deviation of a single run (with n - 1)."""
    low: float
    high: float
    """The interval that holds the mean of all seeds with a probability of 95 %, by Student's t."""

    @property
    def words(self) -> str:
        """`0.9912 ± 0.0012 (5)`: mean, standard deviation with two digits, and the number of seeds."""
        return f"{self._written(self.mean)} ± {self._written(self.deviation)} ({self.runs})"

    @property
    def interval(self) -> str:
        """`0.9897 to 0.9927`."""
        return f"{self._written(self.low)} to {self._written(self.high)}"

    def _written(self, value: float) -> str:
        """The value with as many digits as the standard deviation makes worth reading."""
        if self.deviation == 0 or not math.isfinite(self.deviation):
            return f"{value:.4g}"
        return f"{value:.{max(0, 1 - math.floor(math.log10(self.deviation)))}f}"


class OverSeeds(NamedTuple):
    """What the runs of one experiment with several seeds have ended with."""

    seeds: list[int]
    figures: list[Figure]
    left_out: int
    """How many completed runs were trained from something else than these, or with other numerics."""

    def table(self, name: str) -> str:
        """A line for each figure: mean ± standard deviation (n), and the interval of the mean."""
        seeds = ", ".join(map(str, self.seeds))
        head = f"{name} over the seeds {seeds}: mean ± standard deviation (n), 95 % interval of the mean{self.others}"
        width = max((len(figure.name) for figure in self.figures), default=0)
        rows = [f"{each.name.replace('_', ' '):{width}}  {each.words}  {each.interval}" for each in self.figures]
        return "\n".join([head, *rows, ""])

    @property
    def others(self) -> str:
        """What is said of the runs that are left out; empty where there are none."""
        return f"; left out, of other {' or '.join([*ORIGINS, 'numerics'])}: {self.left_out}" if self.left_out else ""

    @property
    def facts(self) -> dict[str, Any]:
        """The same in plain JSON types."""
        figures = {figure.name: figure._asdict() for figure in self.figures}
        return {"seeds": self.seeds, "left_out": self.left_out, "figures": figures}


ORIGINS = ("code", "data", "parents", "initial weights")
"""What decides the weights, beside the settings."""


def origin_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The digests of what decides the weights of a run, beside its settings."""
    digests = (
        (record.get("source") or {}).get("files"),
        record.get("data_sha256"),
        (record.get("forked_from") or {}).get("weights_sha256"),
        (record.get("init_from") or {}).get("sha256"),
    )
    return dict(zip(ORIGINS, digests, strict=True))


def family_of(record: Mapping[str, Any]) -> str:
    """The same text for the records of runs that differ in their seed, or not at all."""
    settings = {name: value for name, value in dotted(record["experiment"]).items() if name not in _NO_FAMILY}
    return json.dumps(settings, sort_keys=True)


def over_seeds(records: Iterable[Mapping[str, Any]]) -> OverSeeds | None:
    """The figures of the completed runs, of each seed the first one; None for fewer than two seeds.

    `records`: of one family. Where they are not all of the same origin and numerics, those alike with most seeds count.
    A figure that a run does not have, or not as a finite number, is left out of the others.
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
        values = [result.get(name) for result in by_seed.values()]
        if all(isinstance(value, int | float) and math.isfinite(value) for value in values):
            figures.append(_figure(name, [float(value) for value in values if value is not None]))
    return OverSeeds(sorted(by_seed), figures, runs.total() - runs[most])


def _figure(name: str, values: list[float]) -> Figure:
    count, mean, deviation = len(values), statistics.fmean(values), statistics.stdev(values)
    half = students_t(count - 1) * deviation / math.sqrt(count)
    return Figure(name, count, mean, deviation, mean - half, mean + half)


def students_t(degrees: int) -> float:
    """The bound within which 95 % of Student's t with so many degrees of freedom lie, on both sides of 0.

    For t = √degrees · tan(angle) the share within is a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4), which
    grows with the angle; so halving finds the bound to the last digits.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _share_within(angle, degrees) < _COVERAGE else (low, angle)
    return math.sqrt(degrees) * math.tan(low)


def _share_within(angle: float, degrees: int) -> float:
    odd = degrees % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for power in range(2 + odd, degrees + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power - 1) / power
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
