"""What a claim is, and what judging it gives: plain records, in the shape in which the report reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from ddp_lab.claims.framework.setting import Setting

FORMAT = "ddp-claim/1"

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
class Figure:
    """A number that a verdict rests on; low and high are the 99 % interval of statistics.py where there is one."""

    name: str
    value: float | str | bool | None
    unit: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Axis:
    """What is on an axis; the y axis has no values of its own. `zero`: whether it has to start at zero."""

    name: str
    unit: str = ""
    values: Sequence[float | str] = ()
    zero: bool = True


@dataclass(frozen=True)
class Line:
    """One line over the x values; None where nothing was measured."""

    name: str
    values: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None


@dataclass(frozen=True)
class Series:
    """One plot."""

    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]


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


class ClaimFile(Protocol):
    """What a claim's module holds."""

    claim: Claim
    measure: Callable[[Setting], Measurements]
    judge: Callable[[Measurements], Judgement]


@dataclass(frozen=True)
class KnownClaim:
    """A claim's file, loaded: its three parts and its docstring, which tells what is behind the sentence."""

    claim: Claim
    measure: Callable[[Setting], Measurements]
    judge: Callable[[Measurements], Judgement]
    behind: str = field(repr=False, default="")
