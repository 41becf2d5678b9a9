"""The parts of the laboratory's files: written where something is measured, read by the report.

Claims make them from Python values and the report from JSON; both are checked alike, and unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from pydantic.dataclasses import dataclass

CLAIM_FORMAT = "ddp-claim/1"
DRILL_FORMAT = "ddp-drill/1"

Verdict: TypeAlias = Literal["confirmed", "confirmed in part", "refuted", "not measurable here", "inconclusive"]


@dataclass(frozen=True)
class Part:
    """One part of a sentence that says several things, judged by itself."""

    name: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class Figure:
    """A number that a claim's verdict rests on.

    `low` and `high` are its interval where there is one, and `level` the probability with which that interval holds the
    true median. `part` names the part of the sentence to which the number belongs. `stand_in` says what was measured in
    place of the thing that the sentence names: such a number decides nothing.
    """

    name: str
    value: int | float | str | bool | None = None
    unit: str = ""
    low: float | None = None
    high: float | None = None
    level: float | None = None
    part: str = ""
    stand_in: str = ""

    @property
    def label(self) -> str:
        """The name, with the part of the sentence to which it belongs, and with what stood in for the thing itself."""
        part = f"{self.part}: " if self.part else ""
        return f"{part}{self.name}" + (f" (stand-in: {self.stand_in})" if self.stand_in else "")


@dataclass(frozen=True)
class Axis:
    """An axis: an x axis has `values`; for a y axis, `zero` says whether it has to start at 0."""

    name: str = ""
    unit: str = ""
    values: Sequence[float | str | None] = ()
    zero: bool = True


@dataclass(frozen=True)
class Line:
    """One line over the x values, with its band from `low` to `high` if it has one; None where nothing was measured."""

    name: str = ""
    values: Sequence[float | None] = ()
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None


@dataclass(frozen=True)
class Series:
    """One plot of a claim."""

    title: str = ""
    x: Axis = Axis()
    y: Axis = Axis()
    lines: Sequence[Line] = ()
