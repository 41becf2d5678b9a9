"""Does a long run stay as it is: memory, open files, threads, and what its directory grows by?

    python -m benchmarks.long_run [--steps 200000] [--quick] [--json PATH]

toy_mlp on ddp x 2, 1,000 steps an epoch, saved every 100 steps in the background, with TensorBoard. Every five seconds,
of each worker: memory that is its own (MB), open descriptors and threads; a slope is that of a straight line through
the second half. Of the run directory: bytes per step of each file but the checkpoints. It takes about an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import linear_regression
from typing import Any

import psutil

from benchmarks.record import record
from ddp_core.observe.heartbeat import read_heartbeats

FIELDS = ("memory_mb", "descriptors", "threads")


def sampled(process: psutil.Process) -> tuple[float, int, int]:
    """Own memory in MB, open descriptors and threads of a process."""
    with process.oneshot():
        return process.memory_full_info().uss / 1e6, process.num_fds(), process.num_threads()


def watched(words: list[str], output: Path, seconds: float) -> dict[int, list[tuple[int, float, int, int]]]:
    """Run the command to its end; every so many seconds, by rank: step, memory, descriptors and threads."""
    found = defaultdict[int, list[tuple[int, float, int, int]]](list)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, env=environment) as process:
        while process.poll() is None:
            time.sleep(seconds)
            for directory in output.glob("*/*/"):
                for beat in read_heartbeats(directory):
                    with contextlib.suppress(psutil.Error):
                        found[beat["rank"]].append((beat["step"], *sampled(psutil.Process(beat["pid"]))))
    if process.returncode != 0:
        raise SystemExit(f"the run ended with exit code {process.returncode}")
    return found


def slopes(samples: list[tuple[int, float, int, int]]) -> dict[str, float]:
    """By how much each figure grows in 100,000 steps, from the second half of the samples."""
    half = samples[len(samples) // 2 :]
    steps = [each[0] for each in half]
    return {
        name: round(1e5 * linear_regression(steps, [float(each[at]) for each in half]).slope, 3)
        for at, name in enumerate(FIELDS, 1)
    }


def sizes(directory: Path, steps: int) -> dict[str, float]:
    """Bytes per step of each file of a run directory that is no checkpoint."""
    files = (file for file in directory.rglob("*") if file.is_file() and "checkpoints" not in file.parts)
    return {file.relative_to(directory).as_posix(): round(file.stat().st_size / steps, 3) for file in files}


def main() -> None:
    """Train, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--quick", action="store_true", help="400 steps, a look every half second")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    options = parser.parse_args()
    steps = 400 if options.quick else options.steps
    words = [
        "train",
        "toy_mlp",
        "--layout",
        "ddp",
        "--nproc-per-node",
        "2",
        "--device",
        "cpu",
        "--log-to",
        "tensorboard",
    ]
    words += [
        "--checkpoint-every",
        "100",
        "--set",
        f"max_steps={steps}",
        "--set",
        f"epochs={steps}",
        "--set",
        "data.size=16000",
    ]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder)
        words += ["--output", folder]
        samples = watched([sys.executable, "-m", "ddp_core", *words], output, 0.5 if options.quick else 5)
        (directory,) = output.glob("*/*/")
        results: dict[str, Any] = {
            "steps": steps,
            "ranks": {str(rank): {"last": each[-1], "slopes": slopes(each)} for rank, each in sorted(samples.items())},
            "bytes_per_step": sizes(directory, steps),
        }
    for rank, each in results["ranks"].items():
        step, memory, descriptors, threads = each["last"]
        print(f"rank {rank}, step {step}: {memory:.1f} MB of its own, {descriptors} open files, {threads} threads")
        print(f"  and in 100,000 steps more: {each['slopes']}")
    print(f"bytes per step: {sum(results['bytes_per_step'].values()):.1f}: {results['bytes_per_step']}")
    command = f"python -m benchmarks.long_run --steps {steps}"
    print(f"recorded in {record('long_run', command, results, options.json, rounds=1)}")


if __name__ == "__main__":
    main()
