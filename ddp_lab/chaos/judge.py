"""What a drill proves, from files alone: the same weights, every sample once, one writer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddp_core.base.beneath import read_file
from ddp_core.base.errors import DIFFERENT, ExitCode, UserError
from ddp_core.record.directory import RunDirectory
from ddp_lab.chaos.watch import parse_lines
from ddp_lab.records import DRILL_FORMAT


@dataclass
class FaultReport:
    """One fault and what became of it."""

    name: str
    at_step: int | None = None
    noticed_seconds: float | None = None
    resumed_seconds: float | None = None
    steps_lost: int | None = None
    outcome: str = "not reached"
    """`recovered`, or in words what went wrong."""
    exit_codes: dict[str, int] = field(default_factory=dict)
    """The exit codes of the nodes that ended because of the fault."""

    @property
    def good(self) -> bool:
        """Whether the run recovered as it should."""
        return self.outcome == "recovered"


@dataclass
class DrillReport:
    """The content of drill.json."""

    name: str
    backend: str
    seed: int
    faults: list[FaultReport] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    digest: str | None = None
    undisturbed_digest: str | None = None
    identical: bool = False
    left_behind: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    exit_code: int = ExitCode.PEERS_LOST
    seconds: float = 0.0
    run: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The content of drill.json, format ddp-drill/1."""
        return {"format": DRILL_FORMAT} | asdict(self) | {"exit_code": int(self.exit_code)}


def judge(report: DrillReport, run: Path | None, undisturbed: Path | None) -> None:
    """Fill in digests, remarks and exit code.

    The exit code is 0 only where the weights are the same, the run recovered from every fault, and
    nothing is left behind. It is 1 where the run has ended with other weights.
    """
    report.undisturbed_digest = None if undisturbed is None else RunDirectory(undisturbed).read()["weights_sha256"]
    if run is None:
        report.remarks.append("the run never began")
        return
    report.run = str(run)
    try:
        record = RunDirectory(run).read()
    except UserError as error:
        report.remarks.append(str(error))
        return
    report.digest = record["weights_sha256"]
    report.identical = report.digest is not None and report.digest == report.undisturbed_digest
    twice = two_writers(run)
    if twice is not None:
        report.remarks.append(f"two writers: the metrics of one attempt go back from step {twice[0]} to {twice[1]}")
    report.remarks += [f"left behind: {name}" for name in report.left_behind]
    good = report.identical and not report.remarks and all(fault.good for fault in report.faults)
    differ = report.digest is not None and report.undisturbed_digest is not None and not report.identical
    report.exit_code = ExitCode.DONE if good else DIFFERENT if differ else ExitCode.PEERS_LOST


def two_writers(run: Path) -> tuple[int, int] | None:
    """Where one attempt's step records go back, which only a second writer can cause: (step before, step after)."""
    last = 0
    for entry in parse_lines(read_file(run / "metrics.jsonl", 2**31)):
        if entry.get("kind") == "resume":
            # A new rank 0 may be the first to tell of the step from which it goes on.
            last = min(last, entry["step"])
        elif entry.get("kind") == "step":
            if entry["step"] <= last:
                return last, entry["step"]
            last = entry["step"]
    return None


def table(report: DrillReport) -> str:
    """The report as text, for the terminal and the log."""
    rows = [("fault", "at step", "noticed after", "first new step after", "steps lost", "outcome")]
    rows += [
        (
            fault.name,
            _number(fault.at_step),
            _seconds(fault.noticed_seconds),
            _seconds(fault.resumed_seconds),
            _number(fault.steps_lost),
            fault.outcome,
        )
        for fault in report.faults
    ]
    return "\n".join([*_aligned(rows), *_summary(report)])


def _summary(report: DrillReport) -> list[str]:
    same = "identical" if report.identical else "NOT identical"
    return [
        f"weights sha256 {report.digest or '-'}",
        f"undisturbed    {report.undisturbed_digest or '-'}: {same}",
        *(f"skipped: {line}" for line in report.skipped),
        *(f"remark: {remark}" for remark in report.remarks),
        f"drill {report.name} on {report.backend}, seed {report.seed}: "
        f"{'passed' if report.exit_code == 0 else 'FAILED'} in {report.seconds:.0f} s",
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if 0 < column < 5 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
