"""The command line of the claims."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from ddp_core.base.ending import said_by
from ddp_core.base.errors import ExitCode
from ddp_lab.options import Parser


@said_by("ddp")
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, judge again, or document the claims; returns the exit code."""
    parser = Parser(
        prog="ddp claims", description="What the sources say, measured on this machine and judged by stated rules."
    )
    parser.add_argument("claims", nargs="*", metavar="C06", help="which claims (default: all)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help="all claims in about fifteen minutes on two cores (default)")
    how.add_argument("--full", action="store_true", help="more rounds, sizes and seeds")
    how.add_argument("--judge-again", action="store_true", help="apply the rules to stored measurements")
    how.add_argument("--document", action="store_true", help="write the page of all claims, as markdown")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("DDP_OUTPUT", "outputs")), metavar="DIR")
    parser.add_argument(
        "--to", type=Path, default=Path("docs/evidence/claims.md"), metavar="FILE", help="where --document writes"
    )
    return _run(parser.parse_args(arguments))


def _run(options: argparse.Namespace) -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from ddp_lab.claims.framework import suite
    from ddp_lab.claims.framework.setting import Setting

    claims = suite.known_claims(options.claims)
    if options.document:
        from ddp_lab.claims.framework.document import page

        suite.write_text(options.to, page(claims, options.output))
        print(f"claims: {len(claims)} -> {options.to}")
        return ExitCode.DONE
    if options.judge_again:
        return suite.judge_again(claims, options.output, suite.say)
    setting = Setting.here(not options.full, options.output, lambda text: suite.say(f"        {text}"))
    return suite.measure_all(claims, setting, suite.say)
