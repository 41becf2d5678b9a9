"""The command line of the projection, and what it prints and writes."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ddp_core.cli.streams import make_patient
from ddp_core.errors import ExitCode, UserError, said_by
from ddp_lab.projection.costs import Algorithm, Link, all_reduce_seconds
from ddp_lab.projection.hardware import GPUS, LINKS, NETWORK_LATENCY, NETWORKS, NVLINK_LATENCY, Gpu
from ddp_lab.projection.nodes import check_nodes, node_lines
from ddp_lab.projection.published import IN_WORDS, compare
from ddp_lab.projection.spread import Lateness, measured, normal, steps_of
from ddp_lab.projection.step import Step, step

FORMAT = "ddp-projection/1"
RANKS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
MIB = 1024 * 1024
NODES = Path("benchmarks/results/nodes.json")
_ALGORITHMS: tuple[Algorithm, ...] = ("ring", "tree", "exact")

_EPILOG = """what it does:
  1. times all-reduce, broadcast and sends between 2, 3 and 4 processes here, and fits latency and bandwidth to them
  2. checks the fit on what it has not seen: 3 processes, and sizes in between; the target is 15 % in the median
  3. measures how much of DDP's communication backward hides here, and the wait for the slower of 2 processes
  4. checks the model of nodes on shaped links, measured before: fitted on 2 ranks per node, held out are 4 and 8
  5. projects step time and efficiency for the GPU and links that you name: ring, tree, and the exact reduction
  6. sets the model beside published scaling
examples:
  ddp project --gpu a100-amp --link nvlink-a100 --network 1600gbit
  ddp project --gpu v100-fp32 --network 10gbit --gpus-per-node 1 --ranks 1,16,256 --skip-measuring
  ddp project --samples-per-second 50 --batch 16 --gradient-mb 4000 --link 300 --network 50
  ddp project --steps-of RUN --skip-measuring
"""


def build_parser() -> argparse.ArgumentParser:
    """The options of `ddp project`."""
    parser = argparse.ArgumentParser(
        prog="ddp project",
        description="Scaling out on paper: a latency-bandwidth model, checked here, for hardware that is not here.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpu", choices=sorted(GPUS), default="a100-amp", help="ResNet-50 on it (default: a100-amp)")
    parser.add_argument("--samples-per-second", type=_positive, metavar="S", help="your model's speed on one GPU")
    parser.add_argument("--batch", type=_count, metavar="N", help="samples per GPU and step")
    parser.add_argument("--gradient-mb", type=_positive, metavar="MB", help="bytes of all gradients, in 10^6")
    parser.add_argument("--bucket-mb", type=_positive, default=25.0, metavar="MIB", help="DDP's buckets (default: 25)")
    parser.add_argument(
        "--link", default="nvlink-a100", metavar="NAME|GB/s", help=f"inside a node: {', '.join(LINKS)}, or GB/s"
    )
    parser.add_argument(
        "--network", default="1600gbit", metavar="NAME|GB/s", help=f"of a node: {', '.join(NETWORKS)}, or GB/s"
    )
    parser.add_argument("--gpus-per-node", type=_count, default=8, metavar="N")
    spread = parser.add_mutually_exclusive_group()
    spread.add_argument(
        "--jitter",
        type=_not_negative,
        default=0.0,
        metavar="PERCENT",
        help="standard deviation of a rank's compute time, which is normally distributed (default: 0)",
    )
    spread.add_argument(
        "--steps-of",
        type=Path,
        metavar="RUN",
        help="steps scatter as in this run of one rank, trained with --log-every 1",
    )
    parser.add_argument("--ranks", type=_counts, default=RANKS, metavar="N,N,...", help="how many GPUs")
    parser.add_argument("--skip-measuring", action="store_true", help="only project")
    parser.add_argument("--rounds", type=_count, default=25, metavar="N", help="of each measurement (default: 25)")
    parser.add_argument("--nodes", type=Path, metavar="FILE", help=f"what benchmarks.nodes wrote (default: {NODES})")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("DDP_OUTPUT", "outputs")), metavar="DIR")
    return parser


@said_by("ddp")
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, fit, check, project; returns the exit code."""
    make_patient()
    options = build_parser().parse_args(arguments)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    gpu = _gpu(options)
    inside = _link(options.link, LINKS, NVLINK_LATENCY, "--link")
    between = _link(options.network, NETWORKS, NETWORK_LATENCY, "--network")
    content: dict[str, Any] = {"format": FORMAT}
    lateness = normal(options.jitter / 100) if options.steps_of is None else measured(steps_of(options.steps_of))
    if not options.skip_measuring:
        from ddp_lab.projection.here import measure_here

        content["here"] = measure_here(options.rounds, print)
    if options.nodes or NODES.exists():
        content["nodes"] = check_nodes(options.nodes or NODES)
        print("\n".join(node_lines(content["nodes"])))
    content |= {
        "gpu": asdict(gpu),
        "link": asdict(inside),
        "network": asdict(between),
        "gpus_per_node": options.gpus_per_node,
        "bucket_mib": options.bucket_mb,
        "jitter_percent": options.jitter,
        "steps_of": options.steps_of and str(options.steps_of),
        "projection": _project(gpu, inside, between, options, lateness),
        "published": compare(),
    }
    for line in (*_projection_lines(content, gpu, inside, between), *_published_lines(content["published"])):
        print(line)
    path = options.output / "projection" / "projection.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; use another --output DIR", ExitCode.RESOURCES
        ) from None
    print(f"\nwritten to {path}")
    return ExitCode.DONE


def _project(
    gpu: Gpu, inside: Link, between: Link, options: argparse.Namespace, lateness: Lateness
) -> list[dict[str, Any]]:
    rows = []
    for ranks in options.ranks:
        row: dict[str, Any] = {"ranks": ranks}
        late = lateness(ranks)
        for algorithm in _ALGORITHMS:
            found = _step(gpu, inside, between, options, ranks, algorithm, late)
            row[algorithm] = asdict(found) | {"seconds": found.seconds, "efficiency": found.efficiency}
        rows.append(row)
    return rows


def _step(
    gpu: Gpu,
    inside: Link,
    between: Link,
    options: argparse.Namespace,
    ranks: int,
    algorithm: Algorithm,
    lateness: float,
) -> Step:
    def all_reduce(size: float) -> float:
        return all_reduce_seconds(algorithm, size, ranks, options.gpus_per_node, inside, between)

    compute = gpu.batch / gpu.samples_per_second
    return step(compute, gpu.gradient_bytes, all_reduce, ranks, options.bucket_mb * MIB, lateness)


def _projection_lines(content: dict[str, Any], gpu: Gpu, inside: Link, between: Link) -> list[str]:
    lines = [
        "",
        f"projected: {gpu.name}, {gpu.batch} samples per GPU and step, {gpu.gradient_bytes / 1e6:.0f} MB of gradients,",
        f"{content['gpus_per_node']} GPUs per node on {inside.bandwidth / 1e9:.0f} GB/s, "
        f"{between.bandwidth / 1e9:.3g} GB/s between nodes (weak scaling; an upper bound)",
        f"{'GPUs':>6}{'slowest: ms':>12}"
        + "".join(f"{name + ': ms':>12}{'exposed':>10}{'efficiency':>12}" for name in _ALGORITHMS),
    ]
    for row in content["projection"]:
        parts = [
            f"{1e3 * found['seconds']:12.1f}{1e3 * found['exposed']:10.2f}{100 * found['efficiency']:11.1f}%"
            for found in (row[name] for name in _ALGORITHMS)
        ]
        lines.append(f"{row['ranks']:6}{1e3 * row['ring']['slowest']:12.2f}{''.join(parts)}")
    return [*lines, f"sources: {gpu.source}", f"         {inside.source}", f"         {between.source}"]


def _published_lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["", f"{'published':30}{'GPUs':>10}{'speed-up':>10}{'model':>9}{'model is':>10}"]
    for row in rows:
        pair = f"{row['base']} to {row['ranks']}"
        lines.append(
            f"{row['what']:30}{pair:>10}{row['published']:9.2f}x{row['modelled']:8.2f}x{100 * row['error']:+9.1f}%"
        )
    return [*lines, *dict.fromkeys(f"  {row['source']}" for row in rows), f"  {IN_WORDS}"]


def _gpu(options: argparse.Namespace) -> Gpu:
    changes = {
        "samples_per_second": options.samples_per_second,
        "batch": options.batch,
        "gradient_bytes": None if options.gradient_mb is None else options.gradient_mb * 1e6,
    }
    wanted: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
    if not wanted:
        return GPUS[options.gpu]
    given = ", ".join(name.replace("_", " ") for name in wanted)
    return replace(GPUS[options.gpu], **wanted, source=f"{given} as given; {GPUS[options.gpu].source}")


def _link(text: str, known: dict[str, Link], latency: float, option: str) -> Link:
    if text in known:
        return known[text]
    bandwidth = _number(text) * 1e9
    if not 0 < bandwidth < math.inf:
        raise UserError(f"{option} {text}: expected one of {', '.join(known)}, or a number of GB/s")
    return Link(f"{text} GB/s", latency, bandwidth, f"{text} GB/s as given; latency as the other links of its kind")


def _positive(text: str) -> float:
    number = _number(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def _not_negative(text: str) -> float:
    number = _number(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0")
    return number


def _number(text: str) -> float:
    """The number, NaN where the text is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))
