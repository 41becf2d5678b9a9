"""The ratios that several pages have, from recorded results; None where a contender is not recorded yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.record import NOT_YET
from benchmarks.turns import best_bare, summary

BEST_LOOP_TARGET = 1.02
"""The ratio of trainer_step to the best bare loop; here, because to import that takes seconds."""
FULLY_TUNED = "fused, memory kept"
"""How the name of a bare loop ends that does all that torch offers; without one, a case has no best bare loop."""


def best_loop(case: Mapping[str, Any]) -> str | None:
    """The fastest bare loop of a case of trainer_step."""
    is_tuned = any(name.startswith("bare") and name.endswith(FULLY_TUNED) for name in case["turns"])
    return best_bare(case["turns"]) if is_tuned else None


def of_best_bare(case: Mapping[str, Any], contender: str) -> float | None:
    """A contender's step of the best bare loop's, in a case of trainer_step."""
    best = best_loop(case)
    return summary(case["turns"], base=best)[contender]["ratio"] if best else None


def whole_run_of(case: Mapping[str, Any], contender: str, base: str | None) -> float | None:
    """A contender's whole run, per step, of a bare loop's step, in a case of trainer_step."""
    if base is None:
        return None
    return paired((turn["run"] for turn in case["turns"][contender]), (turn["step"] for turn in case["turns"][base]))


def of_fair(row: Mapping[str, Any]) -> float | None:
    """The exact step of FSDP2's with an all-to-all, in a row of fully_sharded."""
    ratios: dict[str, float] = row.get("ratios_to_all_to_all", {})
    return ratios.get("parameters, exact")


def whole_time_of(ways: Mapping[str, Any], way: str, base: str) -> float | None:
    """How long whole runs of a way take, of those of another."""
    if base not in ways:
        return None
    return paired(*((turn["whole"] for turn in ways[each]["rounds"]) for each in (way, base)))


def paired(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """The median over the rounds of the ratio within a round."""
    return median(one / other for one, other in zip(ours, theirs, strict=True))


def said(ratio: float | None, digits: int = 2) -> str:
    """A figure as pages have it."""
    return NOT_YET if ratio is None else f"{ratio:.{digits}f}"


def span(ratios: Sequence[float | None], digits: int = 2) -> str:
    """The least and the largest figure, as pages have them."""
    if not ratios or None in ratios:
        return NOT_YET
    low, high = (f"{each:.{digits}f}" for each in (min(ratios), max(ratios)))  # type: ignore[type-var]
    return low if low == high else f"{low} to {high}"
