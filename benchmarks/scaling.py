"""How much faster two processes are than one: ResNet-18 on 32x32 images, one thread each, through the real launcher.

    python -m benchmarks.scaling [--rounds 7] [--stem 7x7 3x3] [--quick] [--json PATH]

The same experiment (plain reduction, one micro-batch per rank) runs in turns as `--layout single` and as `--layout ddp
--nproc-per-node 2`. Speeds are the runs' own `samples_per_second`, which leaves out start, first step, evaluation and
saving. "two alone" says what the machine allows: two unconnected single processes at once, each with half the batch. If
others use the machine too, they disturb two processes more than one, and the ratios of the rounds scatter: look at the
quartiles. With torchvision's stem (7x7, stride 2, made for 224x224) a 32x32 image costs about a tenth of what it costs
with the stem for small images (3x3), and the same 45 MB of gradients are sent for it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.record import record

TARGET = 1.8
STEMS = {"7x7": ([64, 256], 2048), "3x3": ([64], 320)}
"""Global batches, and about how many samples a run trains."""


def train(output: Path, stem: str, global_batch_size: int, steps: int, *layout: str) -> subprocess.Popen[bytes]:
    """Start one run of ResNet-18 on images in memory."""
    settings = {
        "model.small_input": str(stem == "3x3").lower(),
        "data.image_size": 32,
        "data.samples": global_batch_size * steps,
        "data.pool": 256,
        "global_batch_size": global_batch_size,
        "epochs": 1,
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "ddp_core", "train", "resnet18_synthetic", "--device", "cpu", "--resume", "never"),
            *("--reduction", "plain", "--output", str(output), *words, *layout),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )


def speed(output: Path, run: subprocess.Popen[bytes]) -> float:
    """Samples per second of the one run in `output`, once it has ended. Raises RuntimeError where it failed."""
    if run.wait(600):
        raise RuntimeError(f"a run ended with exit code {run.returncode}")
    (file,) = output.rglob("run.json")
    return float(json.loads(file.read_text())["result"]["samples_per_second"])


def one_round(stem: str, global_batch_size: int, steps: int) -> dict[str, float]:
    """Samples per second of one process, of two with DDP, and of two that do not communicate."""
    whole, half = (stem, global_batch_size, steps), (stem, global_batch_size // 2, steps)
    with tempfile.TemporaryDirectory() as scratch:
        places = [Path(scratch) / name for name in ("single", "ddp", "left", "right")]
        single = speed(places[0], train(places[0], *whole))
        ddp = speed(places[1], train(places[1], *whole, "--layout", "ddp", "--nproc-per-node", "2"))
        pair = [(place, train(place, *half)) for place in places[2:]]
        alone = sum(speed(place, run) for place, run in pair)
    return {"single": single, "ddp x 2": ddp, "two alone": alone}


def measure(cases: list[tuple[str, int, int]], rounds: int) -> list[dict[str, Any]]:
    """One record per stem, global batch and number of samples, printed as they come."""
    results = []
    print(f"ResNet-18, 32x32, one thread each; medians of {rounds} rounds in turns, target {TARGET}")
    print(
        "stem  global batch   single samples/s  ddp x 2 / single (quartiles)  two alone / single  ddp x 2 / two alone"
    )
    for stem, batch, samples in cases:
        turns = [one_round(stem, batch, max(3, samples // batch)) for _ in range(rounds)]
        scaling = [turn["ddp x 2"] / turn["single"] for turn in turns]
        low, _, high = quantiles(scaling, n=4) if len(scaling) > 1 else scaling * 3
        row = {
            "stem": stem,
            "global_batch_size": batch,
            "single_samples_per_second": median(turn["single"] for turn in turns),
            "speed_up": median(scaling),
            "quartiles": [low, high],
            "two_alone": median(turn["two alone"] / turn["single"] for turn in turns),
            "efficiency": median(turn["ddp x 2"] / turn["two alone"] for turn in turns),
            "target": TARGET,
            "rounds": turns,
        }
        results.append(row)
        print(
            f"{stem} {batch:14} {row['single_samples_per_second']:18.1f} {row['speed_up']:14.2f} ({low:.2f} to "
            f"{high:.2f}) {row['two_alone']:20.2f} {row['efficiency']:21.2f}"
        )
    return results


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--stem", nargs="+", choices=list(STEMS), default=list(STEMS))
    parser.add_argument("--quick", action="store_true", help="one round of a few steps; recorded with --json only")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    cases, rounds = [("7x7", 8, 24)], 1
    if not arguments.quick:
        cases = [(stem, batch, STEMS[stem][1]) for stem in arguments.stem for batch in STEMS[stem][0]]
        rounds = arguments.rounds
    results = measure(cases, rounds)
    if arguments.json or not arguments.quick:
        print(record("scaling", "python -m benchmarks.scaling", results, arguments.json, rounds))


if __name__ == "__main__":
    main()
