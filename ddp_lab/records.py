"""The parts of the laboratory's files: written where something is measured, read by the report.

Claims make them from Python values and the report from JSON; both are checked alike, and unknown fields are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from pydantic.dataclasses import dataclass

CLAIM_FORMAT = "ddp-claim/1"
DRILL_FORMAT = "ddp-drill/1"

Bounds: TypeAlias = tuple[float | None, float | None]
"""The least and the greatest value that is possible, None for no limit."""
COUNT: Bounds = (0, None)
"""What may be nothing at all: a count of faults, a difference."""
EITHER_SIGN: Bounds = (None, None)
Verdict: TypeAlias = Literal["confirmed", "confirmed in part", "refuted", "not measurable here", "inconclusive"]


@dataclass(frozen=True)
class Part:
    """One part of a sentence that says several things, judged by itself."""

    name: str
    verdict: Verdict
    reason: str


def verdict_in_words(verdict: str, claim: str, environment: Mapping[str, Any]) -> str:
    """A claim's verdict; it says so where the sentence speaks of GPUs, and a CPU was measured in their place."""
    is_measured = verdict != "not measurable here"
    on_cpu = is_measured and "GPU" in claim and not environment.get("cuda_devices")
    return f"{verdict}, on CPU" if on_cpu else verdict


@dataclass(frozen=True)
class Figure:
    """A number that a claim's verdict rests on.

    `low` and `high` are its interval where there is one, and `level` the probability with which that interval holds the
    true median. `part` names the part of the sentence to which the number belongs. `stand_in` says what was measured in
    place of the thing that the sentence names: such a number decides nothing.

    `bounds` are the least and the greatest value that is physically possible, None for no limit; without them, a number
    has to be greater than 0 and finite, and a percentage at most 100 (`fault`). An interval that bears a verdict has
    `p`, the exact one of the sign test `against` a limit, and every interval the `rounds` that it rests on.
    """

    name: str
    value: int | float | str | bool | None = None
    unit: str = ""
    low: float | None = None
    high: float | None = None
    level: float | None = None
    part: str = ""
    stand_in: str = ""
    bounds: Bounds | None = None
    against: float | None = None
    p: float | None = None
    rounds: int | None = None

    @property
    def label(self) -> str:
        """The name, with the part of the sentence to which it belongs, and with what stood in for the thing itself."""
        part = f"{self.part}: " if self.part else ""
        return f"{part}{self.name}" + (f" (stand-in: {self.stand_in})" if self.stand_in else "")

    @property
    def fault(self) -> str:
        """Why this cannot be what was measured, or empty: zero, not a number, or beyond its bounds."""
        if isinstance(self.value, bool) or (isinstance(self.value, str) and self.value):
            return ""
        ends = [self.value, *(() if self.level is None else (self.low, self.high))]
        if not all(isinstance(end, int | float) and math.isfinite(end) for end in ends):
            return f"{self.label} is no number"
        assert isinstance(self.value, int | float)
        least, most = self.bounds or (None, 100 if self.unit == "%" else None)
        if self.bounds is None and self.value <= 0:
            return f"{self.label} is {self.value:g}, and has to be greater than 0"
        if (least is not None and self.value < least) or (most is not None and self.value > most):
            limits = " and ".join(
                f"at {word} {end:g}" for word, end in (("least", least), ("most", most)) if end is not None
            )
            return f"{self.label} is {self.value:g}, and has to be {limits}"
        return ""


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


def record_text(content: Any, margin: str = "") -> str:
    """JSON for a file that is kept under version control: whatever holds no object is one line, however long.

    So a record of a run is a line, with all its numbers.
    """
    if not isinstance(content, dict | list) or not any(map(_holds_object, _inside(content))):
        return json.dumps(content, ensure_ascii=False)
    inner = margin + " "
    lines = [record_text(value, inner) for value in _inside(content)]
    if isinstance(content, dict):
        lines = [f"{json.dumps(name, ensure_ascii=False)}: {line}" for name, line in zip(content, lines, strict=True)]
    opened, closed = "{}" if isinstance(content, dict) else "[]"
    return f"{opened}\n{inner}" + f",\n{inner}".join(lines) + f"\n{margin}{closed}"


def _inside(content: dict[str, Any] | list[Any]) -> list[Any]:
    return list(content.values() if isinstance(content, dict) else content)


def _holds_object(content: Any) -> bool:
    return isinstance(content, dict) or (isinstance(content, list) and any(map(_holds_object, content)))
