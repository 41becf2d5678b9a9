"""What a claim is, how it is put to the test, and what judging it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from ddp_lab.claims.framework.setting import Setting
from ddp_lab.records import Figure, Series

Verdict: TypeAlias = Literal["confirmed", "refuted", "not measurable here", "inconclusive"]
Measurements: TypeAlias = dict[str, Any]
"""Plain JSON types only: what is judged is what is stored."""


@dataclass(frozen=True)
class Claim:
    """A sentence of the sources, and how it is put to the test.

    `original` quotes the sources exactly; `sources` are the first three digits of their files. `seconds` is what the
    quick and the full measurement take on two quiet cores, for the time that is said to be left.
    """

    id: str
    title: str
    claim: str
    original: str
    sources: tuple[str, ...]
    method: str
    rule: str
    seconds: tuple[float, float] = (25.0, 120.0)


@dataclass(frozen=True)
class Judgement:
    """The verdict, why, in one sentence with its numbers, and what to show."""

    verdict: Verdict
    reason: str
    figures: Sequence[Figure] = ()
    series: Sequence[Series] = ()

    def to_json(self) -> dict[str, Any]:
        """The part of a claim's file that depends on the measurements."""
        content = asdict(self)
        for plot in content["series"]:
            plot["x"] = {name: plot["x"][name] for name in ("name", "unit", "values")}
            plot["y"] = {name: plot["y"][name] for name in ("name", "unit", "zero")}
        return content


def missing(what: str, figures: Sequence[Figure] = (), series: Sequence[Series] = ()) -> Judgement:
    """Not measurable here, for want of `what`."""
    return Judgement("not measurable here", f"needs {what}", figures, series)


@dataclass(frozen=True)
class KnownClaim:
    """A claim's file, loaded: its three parts and its docstring, which tells what is behind the sentence."""

    claim: Claim
    measure: Callable[[Setting], Measurements]
    judge: Callable[[Measurements], Judgement]
    behind: str = field(repr=False, default="")
