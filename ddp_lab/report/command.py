"""The command `ddp report`: its options, and what it prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_core.base.ending import said_by
from ddp_core.base.errors import ExitCode
from ddp_core.base.extras import require
from ddp_lab.options import Parser
from ddp_lab.report.serving import address, serve
from ddp_lab.report.values import plural


@said_by("report")
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report, and serve it if asked to; returns the exit code."""
    parser = Parser(prog="ddp report", description="All runs, claims and drills on one page.")
    output = Path(os.environ.get("DDP_OUTPUT", "outputs"))
    parser.add_argument("--output", type=Path, default=output, help="where the runs are")
    parser.add_argument("--to", type=Path, help="where the report goes (default: OUTPUT/report)")
    parser.add_argument("--serve", metavar="HOST:PORT", help="then serve the page, to be read only")
    known = parser.parse_args(arguments)
    to = known.to or known.output / "report"
    place = address(known.serve) if known.serve else None
    require("the report", "report")
    from ddp_lab.report.page import write_report

    report = write_report(known.output, to)
    counts = {"run": len(report.inventory.runs), "experiment": len(report.families), "claim": len(report.claims)}
    print(f"report: {', '.join(plural(count, word) for word, count in counts.items())} -> {to / 'index.html'}")
    for broken in report.inventory.broken:
        print(f"report: {broken.name}: {broken.problem}", file=sys.stderr)
    for name, problem in report.findings.unreadable:
        print(f"report: {name}: {problem}", file=sys.stderr)
    if place is not None:
        serve(to / "index.html", place)
    return ExitCode.DONE
