"""What the guard costs: the steps of the same training with `--guard normal` and `--guard off`, in turns.

    python -m benchmarks.guard [--rounds 7] [--quick] [--json PATH]

digits for 25 epochs, and a ResNet-18 on images of 64 x 64 for 240 steps, on one process and on ddp x 2, one thread for
each process, the exact reduction. `steps`: from the end of the first step to the end of the last one, with evaluations
and saves. `in its checks`: what run.json has of the guard, in seconds of rank 0. The goal is 1 %.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import record
from benchmarks.trained import trained
from benchmarks.turns import rotated

GUARDS = ("off", "normal")
LAYOUTS = {"single": ("--layout", "single"), "ddp x 2": ("--layout", "ddp", "--nproc-per-node", "2")}
DIGITS = ("digits", "--set", "epochs=25")
RESNET = (
    *("resnet18_synthetic", "--reduction", "exact", "--numerics", "native", "--set", "max_steps=240"),
    *("--set", "epochs=12", "--set", "data.image_size=64", "--set", "data.pool=32", "--set", "data.samples=640"),
    *("--set", "global_batch_size=32", "--set", "micro_batch=8"),
)
TRAININGS = {"digits": DIGITS, "ResNet-18": RESNET}


def timed(words: tuple[str, ...], guard: str, is_quick: bool) -> dict[str, float]:
    """Seconds of the steps of one run, and of its guard's checks."""
    run = trained((*words, "--guard", guard, *(("--set", "max_steps=3") if is_quick else ())))
    found = run.record["attempts"][-1]["guard"]
    checks = sum(found["seconds"].values())
    return {"steps": run.step_seconds, "in its checks": checks}


def measure(rounds: int, is_quick: bool) -> dict[str, Any]:
    """All figures; prints the table."""
    table: dict[str, Any] = {}
    print(f"{'':20}{'steps, off':>12}{'normal':>9}{'ratio':>8}{'quartiles':>17}{'in its checks':>15}{'of steps':>10}")
    for name, words in TRAININGS.items():
        for layout, where in LAYOUTS.items():
            runs: dict[str, list[dict[str, float]]] = {guard: [] for guard in GUARDS}
            for turn in range(rounds):
                for guard in rotated(GUARDS, turn):
                    runs[guard].append(timed((*words, *where), guard, is_quick))
            pairs = zip(runs["normal"], runs["off"], strict=True)
            ratios = sorted(one["steps"] / other["steps"] for one, other in pairs)
            off, normal = (median(run["steps"] for run in runs[guard]) for guard in GUARDS)
            checks = median(run["in its checks"] for run in runs["normal"])
            share = median(run["in its checks"] / run["steps"] for run in runs["normal"])
            low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
            table[f"{name}, {layout}"] = {"ratio": median(ratios), "share": share, "rounds": runs}
            print(
                f"{name + ', ' + layout:20}{off:12.2f}{normal:9.2f}{median(ratios):8.3f}{low:9.3f}{high:8.3f}"
                f"{checks:15.3f}{100 * share:9.2f}%"
            )
    return {"load_average": os.getloadavg(), "trainings": table}


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a round of three steps; recorded with --json only")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    results = measure(rounds, arguments.quick)
    if arguments.json or not arguments.quick:
        command = f"python -m benchmarks.guard --rounds {rounds}"
        print(f"recorded in {record('guard', command, results, arguments.json, rounds)}")


if __name__ == "__main__":
    main()
