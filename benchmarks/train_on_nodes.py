"""A step of `ddp train` on two nodes with a slow link between them: the exact reduction against plain DDP.

    python -m benchmarks.train_on_nodes [--rate 100] [--nproc-per-node 2] [--rounds 5] [--quick] [--json PATH]

Nodes are network namespaces (needs root, `ip` and `tc`), the link is slowed down to `--rate` Mbit/s, the network is the
MLP of `benchmarks.slow_link` with 4.6 MB of gradients. Each way is a launch of its own, in turns; milliseconds are the
median of the steps after the fifth, and the ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.record import record
from benchmarks.slow_link import SAMPLES, ways
from benchmarks.turns import rotated
from ddp_core.distributed.world import free_port
from ddp_lab.claims.measuring import namespaces

NODES = 2
PATIENCE = 300.0
WARM_UP, STEPS = 5, 20


def seconds_of(words: tuple[str, ...], nproc: int, steps: int) -> float:
    """Seconds of a step, the median; the namespaces are there. Raises RuntimeError where a node fails."""
    port = str(free_port())
    with tempfile.TemporaryDirectory() as output:
        settings = [*words, "--set", f"max_steps={steps}", "--rdzv-id", f"nodes-{port}", "--output", output]
        told = {"PET_NNODES": str(NODES), "PET_NPROC_PER_NODE": str(nproc), "PET_MASTER_PORT": port}
        told |= {"PET_MASTER_ADDR": namespaces.address(0), "OMP_NUM_THREADS": "1"}
        train = [sys.executable, "-m", "ddp_core", "train", "digits", "--layout", "ddp", "--device", "cpu", *settings]
        launches = [
            subprocess.Popen(
                [*namespaces.inside(node), *train],
                env=os.environ | told | {"PET_NODE_RANK": str(node)},
                stdout=subprocess.DEVNULL,
            )
            for node in range(NODES)
        ]
        codes = [launch.wait(PATIENCE) for launch in launches]
        if any(codes):
            raise RuntimeError(f"the nodes ended with {codes}")
        (metrics,) = Path(output).glob("digits/*/metrics.jsonl")
        entries = [json.loads(line) for line in metrics.read_text().splitlines()]
        found = [entry for entry in entries if entry["kind"] == "step" and entry["step"] > WARM_UP]
        return float(statistics.median(SAMPLES / entry["samples_per_second"] for entry in found))


def main() -> int:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=100, help="Mbit/s")
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a round of few steps; recorded with --json only")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    if not namespaces.available():
        print("network namespaces need root, `ip` and `tc`: run this as root where iproute2 is", file=sys.stderr)
        return 2
    rounds, steps = (1, WARM_UP + 3) if arguments.quick else (arguments.rounds, WARM_UP + STEPS)
    nproc = arguments.nproc_per_node
    every = ways(NODES * nproc)
    seconds: dict[str, list[float]] = {"DDP": [], "exact": []}
    for turn in range(rounds):
        for way in rotated(seconds, turn):
            with namespaces.joined(NODES):
                for node in range(NODES):
                    namespaces.slow_down(node, arguments.rate)
                seconds[way].append(seconds_of(every[way].options, nproc, steps))
            print(f"{way:6} {1e3 * seconds[way][-1]:8.1f} ms", flush=True)
    ratio = statistics.median(ours / plain for ours, plain in zip(seconds["exact"], seconds["DDP"], strict=True))
    print(f"exact / DDP: {ratio:.2f}")
    if arguments.json or not arguments.quick:
        results = {"rate": arguments.rate, "nproc_per_node": nproc, "ratio": ratio, "seconds": seconds}
        command = f"python -m benchmarks.train_on_nodes --rate {arguments.rate} --nproc-per-node {nproc}"
        command += f" --rounds {rounds}"
        print(f"recorded in {record('train_on_nodes', command, results, arguments.json, rounds)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
