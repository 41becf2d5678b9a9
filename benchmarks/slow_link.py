"""What helps on a slow link: two containers, their links shaped with a token bucket (tbf), ways to send less.

    python -m benchmarks.slow_link [--rates 0,1000,100,20] [--steps 20] [--nproc-per-node 1] [--ways WAY …]

Two nodes of one process or more train an MLP of 1.1 M parameters (4.6 MB of gradients) on digits, in containers of
this project's image. Each way is one launch. While it trains, both nodes' interfaces are set to each rate in turn
(`ddp_lab.chaos.shape`, which does what `tc qdisc … tbf` does). The seconds per step are read from the run's metrics:
the median of the steps after the change. Accumulation takes four micro-batches per step with no_sync; so that it can be
compared, all figures are per 64 samples. There is no bf16 hook: it needs NCCL, and it sends what the fp16 hook sends.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.record import record
from ddp_lab.chaos.containers import BreakableContainers
from ddp_lab.chaos.drill import parse
from ddp_lab.chaos.watch import Progress, Words
from ddp_lab.cluster.cluster import Spec

SIZES = (64, 1024, 1024, 10)
SAMPLES = 64
RANK = 4
PATIENCE = 300.0


def ways(ranks: int = 2) -> dict[str, tuple[str, ...]]:
    """The options of `ddp train` for all ways by name, for so many ranks."""
    plain, share = ("--reduction", "plain"), SAMPLES // ranks
    return {
        "DDP": _settings(*plain),
        "no_sync, 4 micro-batches": _settings(*plain, micro_batch=share, accumulate=4),
        "fp16 hook": _settings(*plain, hook="fp16"),
        f"PowerSGD, rank {RANK}": _settings(*plain, hook="powersgd"),
        "exact": _settings("--reduction", "exact", micro_batch=share),
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


def measure(
    options: tuple[str, ...], rates: list[int], steps: int, nproc: int, say: bool
) -> dict[int, dict[str, float]]:
    """Seconds per 64 samples at each rate (in Mbit/s; 0 is unshaped): median and quartiles of `steps` steps."""
    found: dict[int, dict[str, float]] = {}
    place = Path(tempfile.mkdtemp(prefix="ddp-slow-"))
    drill = parse({"nodes": 2, "faults": [{"fault": "slow", "at_step": 1}], "paced": False})
    cluster = BreakableContainers(drill)
    try:
        (place / "outputs").mkdir()
        (place / "data").mkdir()
        spec = Spec("digits", "ddp", 2, nproc, options, place / "outputs", place / "data")
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
        results[name] = {_named(rate): entry for rate, entry in found.items()}
    print(f"\nms per {SAMPLES} samples")
    print(f"{'':26}" + "".join(f"{_named(rate):>12}" for rate in rates))
    for name, row in results.items():
        print(f"{name:26}" + "".join(f"{1e3 * entry['seconds']:>12.1f}" for entry in row.values()))
    command = f"python -m benchmarks.slow_link --rates {options.rates} --steps {options.steps} --nproc-per-node {nproc}"
    print(f"recorded in {record('slow_link', command, results, options.json, rounds=1)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
