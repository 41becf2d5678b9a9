"""What helps on a slow link: two containers, their links shaped with a token bucket (tbf), ways to send less.

    python -m benchmarks.slow_link [--rates 0,1000,100,20] [--steps 20] [--nproc-per-node 1] [--ways WAY …]

Two nodes of one process or more train an MLP of 1.1 M parameters (4.6 MB of gradients) on digits, in containers of
this project's image. Each way is one launch. While it trains, both nodes' interfaces are set to each rate in turn
(`ddp_lab.chaos.shape`, which does what `tc qdisc … tbf` does). The seconds per step are read from the run's metrics:
the median of the steps after the change. Accumulation takes four micro-batches per step with no_sync; so that it can be
compared, all figures are per 64 samples. There is no bf16 hook: it needs NCCL, and it sends what the fp16 hook sends.

The table also shows what the model of `ddp project` predicts. Its compute time is the step on the unshaped link;
gradients get ready over two thirds of that time and travel in DDP's buckets, at the link's rate less Ethernet's and
TCP's headers; the step waits for what is still on its way when backward ends.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.record import record
from ddp_lab.chaos.containers import BreakableContainers
from ddp_lab.chaos.drill import parse
from ddp_lab.chaos.watch import Progress, Words
from ddp_lab.cluster.cluster import Spec
from ddp_lab.projection.formulas import Link, ring_seconds, step

SIZES = (64, 1024, 1024, 10)
LAYERS = list(pairwise(SIZES))
WEIGHTS, BIASES = sum(a * b for a, b in LAYERS), sum(b for _, b in LAYERS)
SAMPLES = 64
RANK = 4
# 1448 bytes of each frame of 1514 are payload.
PAYLOAD = 1448 / 1514
PATIENCE = 300.0


@dataclass(frozen=True)
class Way:
    """Options of `ddp train`, samples per step, and bytes of gradients that a rank hands to the all-reduce."""

    options: tuple[str, ...]
    samples: int
    gradient_bytes: float


def ways(ranks: int = 2) -> dict[str, Way]:
    """All ways by name, for so many ranks."""
    whole = 4.0 * (WEIGHTS + BIASES)
    plain, share = ("--reduction", "plain"), SAMPLES // ranks
    # A matrix of a x b is sent as P (a x rank) and Q (b x rank), biases as they are.
    factors = 4.0 * (RANK * sum(a + b for a, b in LAYERS) + BIASES)
    return {
        "DDP": Way(_settings(*plain), SAMPLES, whole),
        "no_sync, 4 micro-batches": Way(
            _settings(*plain, micro_batch=SAMPLES // ranks, accumulate=4), 4 * SAMPLES, whole
        ),
        "fp16 hook": Way(_settings(*plain, hook="fp16"), SAMPLES, whole / 2),
        f"PowerSGD, rank {RANK}": Way(_settings(*plain, hook="powersgd"), SAMPLES, factors),
        "exact": Way(_settings("--reduction", "exact", micro_batch=share), SAMPLES, whole),
    }


def _settings(
    *words: str, micro_batch: int | None = None, accumulate: int = 1, hook: str | None = None
) -> tuple[str, ...]:
    samples = SAMPLES * accumulate
    values = {
        "model.name": "mlp",
        "model.sizes": str(list(SIZES)),
        "global_batch_size": str(samples),
        "micro_batch": str(micro_batch or "null"),
        "epochs": "100000",
        "evaluation.every_epochs": "100000",
        "optimizer.lr": "0.001",
    }
    if hook:
        values |= {"ddp.communication_hook": hook, "ddp.powersgd_rank": str(RANK)}
    settings = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    return (*words, *settings, "--log-every", "1", "--checkpoint-every", "1000000", "--timeout", "120")


def measure(way: Way, rates: list[int], steps: int, nproc: int, say: bool) -> dict[int, dict[str, float]]:
    """Seconds per 64 samples at each rate (in Mbit/s; 0 is unshaped): median and quartiles of `steps` steps."""
    found: dict[int, dict[str, float]] = {}
    place = Path(tempfile.mkdtemp(prefix="ddp-slow-"))
    drill = parse({"nodes": 2, "faults": [{"fault": "slow", "at_step": 1}], "paced": False})
    cluster = BreakableContainers(drill)
    try:
        (place / "outputs").mkdir()
        (place / "data").mkdir()
        spec = Spec("digits", "ddp", 2, nproc, way.options, place / "outputs", place / "data")
        words = Words()
        cluster.start(spec)
        cluster.follow(words.hear)
        progress = Progress(spec.output, spec.launch_id)
        # PowerSGD sends whole gradients in its first ten steps.
        _await_step(cluster, progress, words, 15)
        for rate in rates:
            for node in cluster.nodes():
                cluster.slow_down(node, rate * 1000) if rate else cluster.speed_up(node)
            progress.look()
            # Leave out the steps whose bytes were already in the queue when the rate changed.
            begin = progress.step + 3
            _await_step(cluster, progress, words, begin + steps)
            speeds = [
                entry["samples_per_second"]
                for entry in progress.records
                if entry["kind"] == "step" and begin < entry["step"] <= begin + steps
            ]
            seconds = sorted(SAMPLES / speed for speed in speeds if speed)
            low, _, high = quantiles(seconds, n=4)
            found[rate] = {"seconds": median(seconds), "low": low, "high": high, "steps": len(seconds)}
            if say:
                print(f"    {_named(rate):>10}: {1e3 * median(seconds):9.1f} ms", flush=True)
    finally:
        cluster.stop()
        cluster.left_behind()
        shutil.rmtree(place, ignore_errors=True)
    return found


def _await_step(cluster: BreakableContainers, progress: Progress, words: Words, wanted: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        progress.look()
        if progress.step >= wanted:
            return
        if time.monotonic() > deadline or cluster.exit_codes():
            said = "\n".join(line.line for line in words.since(0)[-20:])
            raise RuntimeError(f"step {wanted} was not reached in {PATIENCE:.0f} s, or a node has ended:\n{said}")
        time.sleep(0.05)


def modelled(way: Way, unshaped: float, rate: int, nproc: int) -> float:
    """Seconds per 64 samples by the model of `ddp project`, from the step on the unshaped link."""
    link = Link(0.0, rate * 1e6 / 8 * PAYLOAD)
    parts = way.samples / SAMPLES

    def all_reduce(size: float) -> float:
        return ring_seconds(size, 2 * nproc, nproc, link, link)

    return step(unshaped * parts, way.gradient_bytes, all_reduce).seconds / parts


def _named(rate: int) -> str:
    return "unshaped" if not rate else f"{rate // 1000} Gbit/s" if rate % 1000 == 0 else f"{rate} Mbit/s"


def main() -> int:
    """Measure all ways at all rates, print the table, record it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rates", default="0,1000,100,20", help="Mbit/s; 0 is the link as it is")
    parser.add_argument("--steps", type=int, default=20, help="per rate and way")
    parser.add_argument("--nproc-per-node", type=int, default=1, help="ranks on each of the two nodes")
    parser.add_argument("--ways", nargs="+", choices=list(ways()), help="some of the ways only")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    options = parser.parse_args()
    rates = [int(rate) for rate in options.rates.split(",")]
    results: dict[str, Any] = {}
    nproc = options.nproc_per_node
    for name, way in ways(2 * nproc).items():
        if options.ways and name not in options.ways:
            continue
        print(name, flush=True)
        found = measure(way, rates, options.steps, nproc, say=True)
        results[name] = {
            _named(rate): entry
            | ({"modelled": modelled(way, found[0]["seconds"], rate, nproc)} if rate and 0 in found else {})
            for rate, entry in found.items()
        }
    print(f"\nms per {SAMPLES} samples, measured (the model's)")
    print(f"{'':26}" + "".join(f"{_named(rate):>22}" for rate in rates))
    for name, row in results.items():
        cells = [
            f"{1e3 * entry['seconds']:.1f}" + (f" ({1e3 * entry['modelled']:.1f})" if "modelled" in entry else "")
            for entry in row.values()
        ]
        print(f"{name:26}" + "".join(f"{cell:>22}" for cell in cells))
    command = f"python -m benchmarks.slow_link --rates {options.rates} --steps {options.steps} --nproc-per-node {nproc}"
    print(f"recorded in {record('slow_link', command, results, options.json, rounds=1)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
