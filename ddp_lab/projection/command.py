"""The command line of the projection, and what it writes."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from ddp_core.base.ending import said_by
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.process import make_patient
from ddp_lab.options import Parser
from ddp_lab.projection.costs import Cluster, Link
from ddp_lab.projection.fit import Fitted
from ddp_lab.projection.forecast import beside, compare, forecast_errors, gap, whole_node
from ddp_lab.projection.goodput import FailureCosts, goodput, goodput_lines, measured_costs
from ddp_lab.projection.hardware import GPUS, LINKS, NETWORK_LATENCY, NETWORKS, NVLINK_LATENCY, Gpu
from ddp_lab.projection.nccl import Choice, Shape, choose, exact_seconds
from ddp_lab.projection.nodes import carried_lines, carried_over, check_nodes, node_lines
from ddp_lab.projection.published import Published
from ddp_lab.projection.spread import measured, normal, steps_of
from ddp_lab.projection.step import BUCKET, Step, buckets, step
from ddp_lab.projection.table import origin_lines, projection_lines, published_lines

FORMAT = "ddp-projection/3"
RANKS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
MIB = 1024 * 1024
MOST = 10**9
MOST_BUCKETS = 100_000
NODES = Path("benchmarks/results/nodes.json")
RECOVERY = Path("benchmarks/results/recovery.json")
_SHAPES: dict[str, tuple[Shape, ...]] = {"nccl": ("ring", "tree"), "ring": ("ring",), "tree": ("tree",)}

_EPILOG = """what it does:
  1. times all-reduce, broadcast and sends between 2, 3, 4, 6 and 8 processes here, and fits latency and bandwidth to
     those between 2, 3 and 4; the rule of what is fitted and what is held out is printed first
  2. checks the fit on what it has not seen: 6 and 8 processes, and sizes in between; the target is 15 % in the median
  3. counts the messages of a ring and of a tree that run here, beside the formulas
  4. measures how much of DDP's communication backward hides here, and the wait for the slower of 2 processes
  5. checks the model of nodes on shaped links, measured before: fitted on 2 ranks per node, held out are 4 and 8; and
     predicts those nodes from the fit to 2 to 4 processes alone
  6. projects step time and efficiency for the GPU and links that you name: what NCCL picks, and the exact reduction
  7. sets the model beside published scaling
  8. with --failures: says what these leave of the time, with --recovery restart and live
examples:
  ddp project --gpu v100-fp32 --network 100gbit --ranks 8,16,32 --skip-measuring
  ddp project --gpu v100-fp32 --network 10gbit --gpus-per-node 1 --ranks 1,16,256 --skip-measuring
  ddp project --samples-per-second 50 --batch 16 --gradient-mb 4000 --link 300 --network 50
  ddp project --steps-of RUN --skip-measuring
  ddp project --failures 1,10 --checkpoint-seconds 1800 --restart-seconds 120 --live-seconds 5 --skip-measuring
"""


def build_parser() -> argparse.ArgumentParser:
    """The options of `ddp project`."""
    parser = Parser(
        prog="ddp project",
        description="Scaling out on paper: a latency-bandwidth model, checked here, for hardware that is not here.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpu", choices=sorted(GPUS), default="a100-amp", help="ResNet-50 on it (default: a100-amp)")
    parser.add_argument("--samples-per-second", type=_positive, metavar="S", help="your model's speed on one GPU")
    parser.add_argument("--batch", type=_count, metavar="N", help="samples per GPU and step")
    parser.add_argument("--gradient-mb", type=_positive, metavar="MB", help="bytes of all gradients, in 10^6")
    parser.add_argument("--bucket-mb", type=_positive, metavar="MIB", help="DDP's buckets (default: 1, then 25)")
    parser.add_argument(
        "--link", metavar="NAME|GB/s", help=f"inside a node: {', '.join(LINKS)}, or GB/s (default: the GPU's)"
    )
    parser.add_argument(
        *("--network",),
        metavar="NAME|GB/s",
        help=f"of a node: {', '.join(NETWORKS)}, or GB/s (default: that of the machine with the GPU)",
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
    failing = parser.add_argument_group("failures")
    failing.add_argument(
        "--failures",
        type=_rates,
        metavar="N,N,...",
        help="per hour, of the whole run: print what they leave of the time",
    )
    failing.add_argument(
        "--recovery", type=Path, metavar="FILE", help=f"what benchmarks.recovery wrote (default: {RECOVERY})"
    )
    failing.add_argument(
        "--restart-seconds", type=_positive, metavar="S", help="until the first new step, where all start again"
    )
    failing.add_argument(
        "--live-seconds", type=_positive, metavar="S", help="that the others stand still, at a loss and a join together"
    )
    failing.add_argument(
        "--checkpoint-seconds", type=_positive, default=600.0, metavar="S", help="between checkpoints (default: 600)"
    )
    failing.add_argument(
        "--save-seconds", type=_not_negative, default=0.0, metavar="S", help="that a checkpoint takes (default: 0)"
    )
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
    inside = _link(options.link or gpu.link, LINKS, NVLINK_LATENCY, "--link")
    between = _link(options.network or gpu.network, NETWORKS, NETWORK_LATENCY, "--network")
    cluster = Cluster(options.gpus_per_node, inside, between, gpu.capability)
    bucket_bytes = options.bucket_mb and options.bucket_mb * MIB
    if gpu.gradient_bytes > MOST_BUCKETS * (bucket_bytes or BUCKET):
        raise UserError(f"these gradients fill more than {MOST_BUCKETS} buckets: give a larger --bucket-mb")
    content: dict[str, Any] = {"format": FORMAT}
    lateness = normal(options.jitter / 100) if options.steps_of is None else measured(steps_of(options.steps_of))
    file = options.nodes or (NODES if NODES.exists() else None)
    if not options.skip_measuring:
        from ddp_lab.projection.here import measure_here

        content["here"] = measure_here(options.rounds, print)
        if file:
            content["nodes_from_here"] = carried_over(file, _all_reduce_of(content["here"]), content["here"]["cpu"])
            print("\n".join(carried_lines(content["nodes_from_here"])))
    if file:
        content["nodes"] = check_nodes(file)
        print("\n".join(node_lines(content["nodes"])))
    node_run = None if options.steps_of or options.jitter else whole_node(gpu, cluster)
    content |= {
        "gpu": asdict(gpu),
        "link": asdict(inside),
        "network": asdict(between),
        "gpus_per_node": options.gpus_per_node,
        "bucket_mib": options.bucket_mb,
        "jitter_percent": options.jitter,
        "steps_of": options.steps_of and str(options.steps_of),
        "origins": _origins(content, gpu, inside, between),
        "projection": [_row(ranks, gpu, cluster, bucket_bytes, lateness(ranks)) for ranks in options.ranks],
        "forecast_from": _forecast_from(node_run, bool(options.steps_of or options.jitter)),
        "published": compare(),
        "goodput": options.failures and goodput(_failure_costs(options), options.failures),
    }
    for row in content["projection"]:
        known = node_run is not None and row["ranks"] >= node_run.ranks
        row["forecast"] = row["nccl"]["efficiency"] * gap(node_run) if node_run and known else None
        published = beside(gpu, cluster, row["ranks"])
        row["published"] = published and asdict(published) | {"efficiency": published.efficiency}
    lines = projection_lines(content, gpu, cluster)
    lines += [*origin_lines(content["origins"]), *published_lines(content["published"])]
    for line in (*lines, *(goodput_lines(content["goodput"]) if content["goodput"] else ())):
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


def _failure_costs(options: argparse.Namespace) -> FailureCosts:
    file = options.recovery or (RECOVERY if RECOVERY.exists() else None)
    restart, live = measured_costs(file) if file else (None, None)
    return FailureCosts(
        options.restart_seconds or restart,
        options.live_seconds or live,
        options.checkpoint_seconds,
        options.save_seconds,
    )


def _all_reduce_of(here: dict[str, Any]) -> Fitted:
    found = here["collectives"]["all_reduce"]
    return Fitted(**{field.name: found[field.name] for field in fields(Fitted)})


def _origins(content: dict[str, Any], gpu: Gpu, inside: Link, between: Link) -> dict[str, list[str]]:
    """Where the constants come from, in words."""
    fitted = [
        f"{name} over loopback, {1e6 * found['latency']:.0f} us per message"
        for name, found in content.get("here", {}).get("collectives", {}).items()
    ]
    if "nodes" in content:
        found = content["nodes"]
        fitted.append(f"nodes on shaped links, {1e9 * found['seconds_per_byte']:.2f} ns per byte of a core")
    published = {f"{one.name}: {one.source}" for one in (gpu, inside, between) if "as given" not in one.source}
    given = [f"{one.name}: {one.source}" for one in (gpu, inside, between) if "as given" in one.source]
    tuning = "latencies, and which algorithm is picked: NCCL 2.30.7, src/graph/tuning.cc"
    return {"fitted here": fitted, "published, never checked here": [*sorted(published), tuning], "given": given}


def _forecast_from(node_run: Published | None, spread: bool) -> str:
    if node_run is not None:
        errors, largest = forecast_errors()
        return (
            f"forecast from {node_run.what}: {100 * (1 - gap(node_run)):.1f} % lost on {node_run.ranks} GPUs; such "
            f"forecasts were off by {100 * min(errors):+.1f} to {100 * max(errors):+.1f} % on {len(errors)} published "
            f"runs of up to {largest} GPUs\n(?: more GPUs than the forecast was checked on)"
        )
    if spread:
        return "no forecast: a published run's loss contains its stragglers, which --jitter and --steps-of add already"
    return (
        "no forecast: no published run on one node has this GPU, batch and model at this speed, in nodes with these "
        "links and this network; all are bounds"
    )


def _row(ranks: int, gpu: Gpu, cluster: Cluster, bucket_bytes: float | None, lateness: float) -> dict[str, Any]:
    def nccl(size: float, shapes: tuple[Shape, ...]) -> Choice:
        return choose(size, ranks, cluster, shapes)

    def seconds(size: float, shapes: tuple[Shape, ...]) -> float:
        return nccl(size, shapes).seconds

    largest = max(buckets(gpu.gradient_bytes, bucket_bytes))
    row: dict[str, Any] = {"ranks": ranks, "nccl_picks": nccl(largest, _SHAPES["nccl"]).name if ranks > 1 else "-"}
    ways: dict[str, Callable[[float], float]] = {name: partial(seconds, shapes=some) for name, some in _SHAPES.items()}
    for name, all_reduce in (ways | {"exact": partial(exact_seconds, ranks=ranks, cluster=cluster)}).items():
        found = _step(gpu, all_reduce, ranks, bucket_bytes, lateness)
        row[name] = asdict(found) | {"seconds": found.seconds, "efficiency": found.efficiency}
    return row


def _step(
    gpu: Gpu, all_reduce: Callable[[float], float], ranks: int, bucket_bytes: float | None, lateness: float
) -> Step:
    compute = gpu.batch / gpu.samples_per_second
    return step(compute, gpu.gradient_bytes, all_reduce, ranks, bucket_bytes, lateness)


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
    if not 1 <= bandwidth <= 1e9 * MOST:
        raise UserError(f"{option} {text}: expected one of {', '.join(known)}, or a number of GB/s")
    source = f"{text} GB/s as given; latency as the other links of its kind"
    return Link(f"{text} GB/s", latency, bandwidth, source, next(iter(known.values())).medium)


def _positive(text: str) -> float:
    number = _number(text)
    if not 1 / MOST <= number <= MOST:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0, from {1 / MOST:g} to {MOST:g}")
    return number


def _not_negative(text: str) -> float:
    number = _number(text)
    if not 0 <= number <= MOST:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to {MOST:g}")
    return number


def _number(text: str) -> float:
    """The number, NaN where the text is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > len(str(MOST)) or not 1 <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 to {MOST}")
    return int(text)


def _rates(text: str) -> tuple[float, ...]:
    return tuple(_not_negative(part) for part in text.split(","))


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))
