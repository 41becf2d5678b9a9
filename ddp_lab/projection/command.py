"""The command line of the projection."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ddp_core.base.ending import said_by
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.process import make_patient
from ddp_core.record.directory import RunDirectory
from ddp_lab.options import Parser
from ddp_lab.projection.formulas import Link, exact_seconds, ring_seconds, step

RANKS = (1, 2, 4, 8, 16, 64, 256, 1024)
MOST = 10**9
MOST_GRADIENT_MB = 10**7

_EPILOG = """A formula, not a measurement: nothing here has been held against a run on several GPUs.
examples:
  ddp train digits --layout single
  ddp project RUN --link 240 --network 50
  ddp project --samples-per-second 50 --batch 16 --gradient-mb 4000 --link 300 --network 50
"""


def build_parser() -> argparse.ArgumentParser:
    """The options of `ddp project`."""
    parser = Parser(
        prog="ddp project",
        description="What a step would take on more GPUs, by formula, from a step measured on one.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run", type=Path, nargs="?", metavar="RUN", help="a completed run of one rank: its speed counts"
    )
    parser.add_argument("--samples-per-second", type=_number, metavar="S", help="in place of RUN: the speed of one GPU")
    parser.add_argument("--batch", type=_count, metavar="N", help="samples per GPU and step (default: as in RUN)")
    parser.add_argument(
        "--gradient-mb", type=_number, metavar="MB", help="all gradients, in 10^6 bytes (default: as in RUN)"
    )
    parser.add_argument("--link", type=_number, required=True, metavar="GB/s", help="a GPU's link inside a node")
    parser.add_argument(
        "--network", type=_number, metavar="GB/s", help="a node's link, all adapters (default: as --link)"
    )
    parser.add_argument(
        "--latency", type=_number, default=5.0, metavar="US", help="of a message inside a node (default: 5)"
    )
    parser.add_argument(
        "--network-latency", type=_number, default=20.0, metavar="US", help="between nodes (default: 20)"
    )
    parser.add_argument("--gpus-per-node", type=_count, default=8, metavar="N")
    parser.add_argument("--ranks", type=_counts, default=RANKS, metavar="N,N,...", help="how many GPUs")
    return parser


@said_by("ddp")
def main(arguments: Sequence[str] | None = None) -> int:
    """Compute and print; returns the exit code."""
    make_patient()
    options = build_parser().parse_args(arguments)
    speed, batch, gradient_mb = _measured(options.run) if options.run is not None else (None, None, None)
    speed = options.samples_per_second or speed
    batch, gradient_mb = options.batch or batch, options.gradient_mb or gradient_mb
    if speed is None or batch is None or gradient_mb is None:
        raise UserError(
            "name a RUN, or give --samples-per-second, --batch and --gradient-mb (see `ddp project --help`)"
        )
    if gradient_mb > MOST_GRADIENT_MB:
        raise UserError(f"--gradient-mb {gradient_mb:g}: expected at most {MOST_GRADIENT_MB}")
    inside = Link(1e-6 * options.latency, 1e9 * options.link)
    between = Link(1e-6 * options.network_latency, 1e9 * (options.network or options.link))
    compute = batch / speed
    print(
        "by formula, held against no run on several GPUs; of one GPU the step is as measured or given\n"
        f"{batch} samples per GPU and step in {1e3 * compute:.1f} ms, {gradient_mb:g} MB of gradients; "
        f"{options.gpus_per_node} GPUs per node\n"
        f"{options.link:g} GB/s and {options.latency:g} us inside a node, "
        f"{between.bandwidth / 1e9:g} GB/s and {options.network_latency:g} us between nodes\n"
        f"{'':6}{'ring all-reduce':>34}{'exact reduction':>34}\n"
        f"{'GPUs':>6}" + 2 * f"{'ms':>12}{'exposed':>10}{'at most':>12}"
    )
    for ranks in options.ranks:
        line = f"{ranks:6}"
        for way in (ring_seconds, exact_seconds):
            sums = partial(way, ranks=ranks, per_node=options.gpus_per_node, inside=inside, between=between)
            found = step(compute, 1e6 * gradient_mb, sums)
            line += f"{1e3 * found.seconds:12.1f}{1e3 * found.exposed:10.2f}{100 * found.efficiency:10.1f} %"
        print(line)
    return ExitCode.DONE


def _measured(run: Path) -> tuple[float, int, float]:
    """Samples per second, samples per step and megabytes of gradients. Raises UserError (2) where RUN cannot say it."""
    record = RunDirectory(run).read()
    layout, result = record["layout"], record["result"]
    if layout["nnodes"] * layout["nproc_per_node"] != 1:
        raise UserError(
            f"{run} was trained on {layout['label']}: its steps have communication in them; name a run of one rank"
        )
    speed, parameters = result.get("samples_per_second"), result.get("parameters")
    if not isinstance(speed, int | float) or not speed > 0 or not isinstance(parameters, int):
        raise UserError(f"{run} has no speed in its run.json: name a run that is completed")
    return speed, record["experiment"]["global_batch_size"], 4e-6 * parameters


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 / MOST <= number <= MOST:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0, from {1 / MOST:g} to {MOST:g}")
    return number


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > len(str(MOST)) or not 1 <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 to {MOST}")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))
