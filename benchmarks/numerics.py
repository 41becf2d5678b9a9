"""What portable numerics cost: shipped experiments and single operations, native against portable, in one thread.

    python -m benchmarks.numerics [--rounds 5] [--quick] [--json PATH]

Each round trains every experiment for a few steps with either numerics, in processes of their own that take turns, and
times two operations: a large product of matrices (MKL's) and a convolution (oneDNN's). Start-up does not count, nor do
evaluations. Ratios are of speeds, portable to native, as medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.turns import rotated
from ddp_core.config.records import Numerics
from ddp_core.numerics.limits import LIMITS

WAYS: tuple[Numerics, ...] = ("native", "portable")
RESNET = ("data.image_size=64", "data.samples=512", "data.pool=64", "global_batch_size=32", "max_steps=8")
EXPERIMENTS: dict[str, tuple[str, ...]] = {
    "digits": ("max_steps=220",),
    "linear_regression": ("epochs=30",),
    "toy_mlp": ("epochs=60",),
    "counter_buffer": ("epochs=300",),
    "char_transformer": ("max_steps=60",),
    "resnet18_synthetic": RESNET,
}
DEFAULT_GOAL = 0.9
"""An experiment is portable by default where that costs a tenth of its speed or less."""

OPERATIONS = {
    "product of 1024 x 1024 matrices": ("torch.randn(1024, 1024), torch.randn(1024, 1024)", "torch.mm", 2 * 1024**3),
    "convolution 64 to 64, 3 x 3, of 16 images of 32 x 32": (
        "torch.randn(16, 64, 32, 32), torch.randn(64, 64, 3, 3)",
        "torch.conv2d",
        2 * 16 * 30 * 30 * 64 * 64 * 9,
    ),
}
TIMING = """
import time, torch
torch.set_num_threads(1)
inputs, best = ({inputs}), float("inf")
for _ in range(12):
    start = time.perf_counter()
    {function}(*inputs)
    best = min(best, time.perf_counter() - start)
print({work} / best / 1e9)
"""


def train(name: str, settings: tuple[str, ...], numerics: Numerics) -> float:
    """Samples per second of a run of its own."""
    with tempfile.TemporaryDirectory(prefix="numerics-") as output:
        words = ["train", name, "--device", "cpu", "--numerics", numerics, "--output", output]
        words += [word for each in settings for word in ("--set", each)]
        _run([sys.executable, "-m", "ddp_core", *words], {})
        (record,) = Path(output).glob("*/*/run.json")
        speed: float = json.loads(record.read_text())["result"]["samples_per_second"]
        return speed


def compute(operation: str, numerics: Numerics) -> float:
    """10^9 operations with numbers per second, of the fastest of twelve calls."""
    inputs, function, work = OPERATIONS[operation]
    script = TIMING.format(inputs=inputs, function=function, work=work)
    return float(_run([sys.executable, "-c", script], dict(LIMITS) if numerics == "portable" else {}))


def _run(words: list[str], variables: dict[str, str]) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in LIMITS}
    environment = kept | {"OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def measure(rounds: int, quick: bool) -> list[dict[str, Any]]:
    """All figures, printed as they come."""
    tasks: dict[str, tuple[str, Callable[[Numerics], float]]] = {}
    for name, settings in EXPERIMENTS.items():
        if not quick or name == "toy_mlp":
            tasks[name] = ("samples/s", lambda way, name=name, settings=settings: train(name, settings, way))  # type: ignore[misc]
    for name in OPERATIONS:
        tasks[name] = ("GFLOP/s", lambda way, name=name: compute(name, way))  # type: ignore[misc]
    rows = []
    print(f"medians of {rounds} rounds in turns\n{'':54}      native    portable  portable / native")
    for name, (unit, speed) in tasks.items():
        speeds: dict[Numerics, list[float]] = {way: [] for way in WAYS}
        for turn in range(rounds):
            for way in rotated(WAYS, turn):
                speeds[way].append(speed(way))  # type: ignore[arg-type,index]
        ratio = median(ours / theirs for ours, theirs in zip(speeds["portable"], speeds["native"], strict=True))
        native, portable = (median(speeds[way]) for way in WAYS)
        rows.append({"what": name, "unit": unit, "native": native, "portable": portable, "ratio": ratio})
        print(f"{name:54}{native:12.1f}{portable:12.1f}  {ratio:17.2f}  {unit}", flush=True)
    return rows


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of one experiment")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    from benchmarks.record import record  # it loads torch

    rounds = 1 if arguments.quick else arguments.rounds
    found = measure(rounds, arguments.quick)
    print(record("numerics", "python -m benchmarks.numerics", found, arguments.json, rounds))


if __name__ == "__main__":
    main()
