"""The memory that a rank needs, measured, for each shard mode on 2 and 4 ranks.

    python -m benchmarks.shard_memory [--ranks 2 4] [--steps 3] [--quick] [--json PATH]

`ddp train char_transformer` with 25 million parameters, whose gradients and optimizer state are most of the memory,
makes a few steps in every mode; each run records what its first steps took and what was there before them (libraries,
data and the model).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.record import record
from ddp_core.config.layout import SHARD_MODES
from ddp_core.record.directory import find_runs

MODES = ("none", *SHARD_MODES)
LARGE = ("model.width=512", "model.depth=8")
# Few samples: only the first steps count, and evaluating takes time.
SHORT = ("data.stride=512", "evaluation.samples_per_batch=4")


def train(ranks: int, mode: str, settings: list[str]) -> dict[str, Any]:
    """The result of a run of its own."""
    with tempfile.TemporaryDirectory(prefix="shard-memory-") as output:
        words = ["train", "char_transformer", "--device", "cpu", "--layout", "ddp", "--nproc-per-node", str(ranks)]
        words += ["--shard", mode, "--output", output, *(word for each in settings for word in ("--set", each))]
        done = subprocess.run([sys.executable, "-m", "ddp_core", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"ddp {' '.join(words)} ended with {done.returncode}: {done.stderr}")
        ((_, found),) = find_runs(Path(output))
        return dict(found["result"])


def measure(worlds: list[int], settings: list[str]) -> list[dict[str, Any]]:
    """All figures, printed as they come."""
    rows = []
    print("ranks shard       at the start, MB  in steps, MB")
    for ranks in worlds:
        for mode in MODES:
            result = train(ranks, mode, settings)
            start, measured = (result[f"{name}_bytes"] for name in ("memory_at_start", "step_memory"))
            row = {
                "ranks": ranks,
                "shard": mode,
                "parameters": result["parameters"],
                "start_bytes": start,
                "measured_bytes": measured,
            }
            rows.append(row)
            print(f"{ranks:5} {mode:<11} {start / 1e6:16.0f} {measured / 1e6:13.0f}", flush=True)
    return rows


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small network on two ranks, two steps")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.ranks, arguments.steps = [2], 2
    settings = [f"max_steps={arguments.steps}", *SHORT, *(() if arguments.quick else LARGE)]
    found = measure(arguments.ranks, settings)
    print(record("shard_memory", "python -m benchmarks.shard_memory", found, arguments.json, rounds=1))


if __name__ == "__main__":
    main()
