"""Numbers as people read them, and tables that know how to sort."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

ABSENT = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"


def finite(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, with thousands set apart; large ones and counts whole."""
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


def percent(share: float | None) -> str:
    """A share of one as a percentage."""
    return ABSENT if share is None else f"{100 * share:.1f} %"


def duration(seconds: float | None) -> str:
    """Seconds as 0.42 s, 12.3 s, 4 min 05 s, 2 h 03 min."""
    if seconds is None:
        return ABSENT
    if seconds < 60:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(count: float | None) -> str:
    """Bytes in MB or GB (powers of ten)."""
    if count is None:
        return ABSENT
    return f"{number(count / 1e6)} MB" if count < 1e9 else f"{number(count / 1e9)} GB"


def slug(text: str) -> str:
    """A name for files and anchors."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


def plural(count: int, word: str) -> str:
    """1 run, 2 runs."""
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
        """The spread of the values that are there; None where none is."""
        found = [value for value in values if value is not None]
        return cls(statistics.median(found), min(found), max(found), len(found)) if found else None

    def over(self, divisor: float) -> Spread:
        """All three divided."""
        return Spread(self.median / divisor, self.low / divisor, self.high / divisor, self.count)


@dataclass(frozen=True)
class Cell:
    """What a table shows, with a `note` below it.

    `order` is what it sorts by, `tone` how it is set (good, bad, warn, quiet, code), `link` an anchor.
    """

    text: str
    order: float | str | None = None
    tone: str = ""
    link: str = ""
    note: str = ""

    @property
    def line(self) -> str:
        """Text and note in one line."""
        return f"{self.text} ({self.note})" if self.note else self.text


@dataclass(frozen=True)
class Column:
    """A heading; numbers are set right."""

    title: str
    numeric: bool = False
    hint: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]] = field(default_factory=list)


def text(value: Any, tone: str = "", link: str = "") -> Cell:
    """A cell of text."""
    return Cell(ABSENT if value is None or value == "" else str(value), None, tone, link)


def figure(value: float | None, shown: str | None = None, tone: str = "") -> Cell:
    """A cell with a number; sorted by the number, whatever it is shown as."""
    return Cell(number(value) if shown is None else shown, value, tone)
