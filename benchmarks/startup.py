"""What a rank costs before the first step: `ddp train` of one step, on more and more ranks.

    python -m benchmarks.startup [--ranks 1 8 32 64 128] [--rounds 3] [--json PATH]

Seconds are those of the whole command, from the shell to its end; processor seconds those of all its processes. Per
rank: processor seconds beyond those of one rank, divided by the ranks beyond the first. The budget is one processor
second a rank. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import record

BUDGET = 1.0


def start(ranks: int) -> tuple[float, float]:
    """Seconds and processor seconds of one training of one step."""
    settings = [f"global_batch_size={max(ranks, 2)}", "micro_batch=1", "max_steps=1"]
    with tempfile.TemporaryDirectory() as output:
        words = ["train", "digits", "--device", "cpu", "--layout", "ddp", "--nproc-per-node", str(ranks)]
        words += ["--output", output, *(word for setting in settings for word in ("--set", setting))]
        began, work = time.perf_counter(), _processor_seconds()
        subprocess.run(
            [sys.executable, "-m", "ddp_core", *words],
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        return time.perf_counter() - began, _processor_seconds() - work


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(worlds: list[int], rounds: int) -> list[dict[str, Any]]:
    """All figures, printed as they come."""
    print(" ranks   seconds   processor seconds   a rank more (budget)")
    rows: list[dict[str, Any]] = []
    for ranks in worlds:
        runs = [start(ranks) for _ in range(rounds)]
        seconds, processor = (statistics.median(values) for values in zip(*runs, strict=True))
        more = (processor - rows[0]["processor_seconds"]) / (ranks - rows[0]["ranks"]) if rows else None
        rows.append({"ranks": ranks, "seconds": seconds, "processor_seconds": processor, "a_rank_more": more})
        last = "-" if more is None else f"{more:.2f} ({BUDGET:.2f})"
        print(f"{ranks:6} {seconds:9.1f} {processor:19.1f} {last:>22}", flush=True)
    return rows


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    results = measure(arguments.ranks, arguments.rounds)
    ranks = " ".join(map(str, arguments.ranks))
    command = f"python -m benchmarks.startup --ranks {ranks} --rounds {arguments.rounds}"
    print(f"recorded in {record('startup', command, results, arguments.json, arguments.rounds)}")


if __name__ == "__main__":
    main()
