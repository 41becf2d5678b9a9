"""Numbers as people read them, and the tables that the page and the Markdown show."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

ABSENT = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
TONES = {
    "completed": "good",
    "failed": "bad",
    "stopped": "warn",
    "interrupted": "warn",
    "running": "quiet",
    "unreadable": "bad",
    "confirmed": "good",
    "confirmed in part": "warn",
    "refuted": "bad",
    "inconclusive": "warn",
    "not measurable here": "quiet",
    "recovered": "good",
}
"""The tone in which the status of a run, the verdict on a claim or the outcome of a fault is shown."""


def finite(value: Any) -> float | None:
    """Return a finite number as a float, and None for anything else that a JSON file may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def number(value: float | None, digits: int = 3) -> str:
    """Return the number with `digits` significant digits; integers and large numbers whole, with commas."""
    if value is None:
        return ABSENT
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 10**digits:
        return f"{value:,.0f}" if size < 1e9 else f"{value:.2e}"
    if size < 1e-4:
        return f"{value:.2e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{value:,.{decimals}f}"


def spread_range(spread: Spread, scale: float = 1.0, digits: int = 3) -> str:
    """Return the lowest and the highest of several measurements."""
    return f"{number(spread.low * scale, digits)} to {number(spread.high * scale, digits)}"


def duration(seconds: float | None) -> str:
    """Return seconds as 0.420 s, 12.3 s, 4 min 05 s, 2 h 03 min."""
    if seconds is None:
        return ABSENT
    if seconds < 60:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def moment(stamp: str | None) -> str:
    """Return an ISO time as date, hour and minute."""
    return stamp.replace("T", " ").removesuffix("Z")[:16] if stamp else ABSENT


def plain(value: Any) -> str:
    """Return any value of a JSON file in words."""
    if value is None or value == "":
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def slug(text: str) -> str:
    """Return the text as a name for files and anchors: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


def plural(count: int, word: str) -> str:
    """Return the count with its word: 1 run, 2 runs."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of some measurements."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Self | None:
        """Return the spread of the values that are not None; None where all are None."""
        found = [value for value in values if value is not None]
        return cls(statistics.median(found), min(found), max(found), len(found)) if found else None

    def over(self, divisor: float) -> Spread:
        """Return the same with all values divided."""
        return Spread(self.median / divisor, self.low / divisor, self.high / divisor, self.count)


@dataclass(frozen=True)
class Cell:
    """One cell of a table: its text, with a `note` below it.

    `order` is what the column is sorted by (the text where None), `tone` says how the text is shown (good, bad, warn,
    quiet, code), and `link` is an anchor on the page.
    """

    text: str
    order: float | str | None = None
    tone: str = ""
    link: str = ""
    note: str = ""


@dataclass(frozen=True)
class Column:
    """The heading of a column, with a hint; numbers are aligned to the right and sorted by value."""

    title: str
    numeric: bool = False
    hint: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells, one cell for each column."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]] = field(default_factory=list)


def text(value: Any, tone: str = "", link: str = "") -> Cell:
    """Return a cell of text."""
    return Cell(ABSENT if value is None or value == "" else str(value), None, tone, link)


def figure(value: float | None, shown: str | None = None, tone: str = "") -> Cell:
    """Return a cell with a number, shown as `shown` if given, and sorted by the number."""
    return Cell(number(value) if shown is None else shown, value, tone)
