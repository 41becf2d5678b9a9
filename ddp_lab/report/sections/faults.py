"""Faults: what each drill broke, and what became of the training."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_lab.report.reading.claims import Drill
from ddp_lab.report.values import TONES, Column, Table, figure, text


@dataclass(frozen=True)
class DrillSection:
    """One drill: its faults as a table, its judgement in words."""

    drill: Drill
    table: Table

    @property
    def passed(self) -> bool:
        """Whether the training ended as if nothing had happened."""
        return self.drill.identical is True and self.drill.exit_code in (0, None)


def drill_section(drill: Drill) -> DrillSection:
    """Return the section of one drill."""
    columns = [
        Column("fault"),
        Column("at step", True),
        Column("noticed after (s)", True),
        Column("training again after (s)", True),
        Column("steps lost", True),
        Column("outcome"),
    ]
    rows = [
        [
            text(fault.name),
            *map(figure, (fault.at_step, fault.noticed_seconds, fault.resumed_seconds, fault.steps_lost)),
            text(fault.outcome, TONES.get(fault.outcome or "", "bad")),
        ]
        for fault in drill.faults
    ]
    return DrillSection(drill, Table(columns, rows))
