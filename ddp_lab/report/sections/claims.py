"""Claims: the table of verdicts, and each claim with its plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_core.config.records import dotted
from ddp_lab.records import Figure, verdict_in_words
from ddp_lab.report import values
from ddp_lab.report.charts.claims import claim_plots
from ddp_lab.report.charts.plot import Plot
from ddp_lab.report.reading.claims import Claim
from ddp_lab.report.values import TIMES, TONES, Column, Table, number, plain, slug, text


@dataclass(frozen=True)
class ClaimSection:
    """One claim with its plots."""

    claim: Claim
    plots: list[Plot]
    environment: list[tuple[str, str]]

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        return verdict_in_words(self.claim.verdict, self.claim.claim, self.claim.environment)

    @property
    def tone(self) -> str:
        """The tone in which the verdict is shown."""
        return TONES.get(self.claim.verdict, "quiet")


def claim_section(claim: Claim) -> ClaimSection:
    """Return the section of one claim."""
    facts = [(name, plain(value)) for name, value in dotted(claim.environment).items()]
    return ClaimSection(claim, claim_plots(claim), facts)


def claims_table(sections: Sequence[ClaimSection]) -> Table:
    """Return a row for each claim, with a link to it."""
    columns = [Column("id"), Column("claim"), Column("verdict"), Column("measured")]
    rows = [
        [
            text(section.claim.id, link=f"claim-{slug(section.claim.id)}"),
            text(section.claim.title),
            text(section.verdict, section.tone),
            text(section.claim.reason),
        ]
        for section in sections
    ]
    return Table(columns, rows)


def interval(item: Figure) -> str:
    """Return the value with its unit, and its interval in brackets."""
    if isinstance(item.value, bool):
        return "yes" if item.value else "no"
    if not isinstance(item.value, int | float):
        return values.ABSENT if item.value is None else str(item.value)
    unit = TIMES if item.unit == "x" else f" {item.unit}" if item.unit else ""
    shown = f"{number(item.value)}{unit}"
    if item.low is None or item.high is None:
        return shown
    level = "" if item.level is None else f" at {100 * item.level:.2f} %"
    return f"{shown} [{number(values.finite(item.low))}, {number(values.finite(item.high))}]{level}"
