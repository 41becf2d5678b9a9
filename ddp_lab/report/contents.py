"""Everything that the page shows, put together for the templates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddp_lab.report.charts.learning import styles
from ddp_lab.report.reading.claims import Findings, read_findings
from ddp_lab.report.reading.families import find_families
from ddp_lab.report.reading.runs import Inventory, read_runs
from ddp_lab.report.sections.claims import ClaimSection, claim_section, claims_table
from ddp_lab.report.sections.experiments import FamilySection, family_section
from ddp_lab.report.sections.faults import DrillSection, drill_section
from ddp_lab.report.sections.overview import runs_table
from ddp_lab.report.sections.runs import RunSection, run_section
from ddp_lab.report.values import Table, moment


@dataclass(frozen=True)
class Report:
    """The sections of the page, and the records that they were made from."""

    inventory: Inventory
    findings: Findings
    runs_table: Table
    families: list[FamilySection]
    claims: list[ClaimSection]
    claims_table: Table
    drills: list[DrillSection]
    runs: list[RunSection]

    @property
    def period(self) -> str:
        """When the first and the last run were started."""
        moments = sorted(run.record["started_at"] for run in self.inventory.runs if run.record["started_at"])
        if not moments:
            return ""
        first, last = moments[0], moments[-1]
        return moment(first) if first == last else f"{moment(first)} to {moment(last)}"


def build_report(output: Path) -> Report:
    """Return everything below `output`, read and judged, its charts drawn but not yet saved."""
    inventory, findings = read_runs(output), read_findings(output)
    families = find_families(inventory.runs)
    style = styles(families)
    claims = [claim_section(claim) for claim in findings.claims]
    return Report(
        inventory,
        findings,
        runs_table(inventory),
        [family_section(family, style) for family in families],
        claims,
        claims_table(claims),
        [drill_section(drill) for drill in findings.drills],
        [run_section(run) for run in reversed(inventory.runs)],
    )
