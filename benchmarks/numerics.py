"""What portable numerics cost: shipped experiments and single operations, native against portable, in one thread.

    python -m benchmarks.numerics [--rounds 3] [--ways native portable] [--quick] [--json PATH]

Three rounds of native and portable numerics take a quarter of an hour on two quiet cores.

Each round trains every experiment for a few steps with every kind of numerics, in processes of their own that take
turns, and times single operations. Start-up does not count, nor do evaluations. Ratios are of speeds, to native, as
medians over the rounds. On a CPU with AVX-512, "native, held to AVX2" says how much of the cost is that alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.turns import rotated
from ddp_core.config.records import Numerics
from ddp_core.numerics.limits import LIMITS

HELD = "native, held to AVX2"
WAYS: dict[str, Numerics] = {
    "native": "native",
    HELD: "native",
    "portable": "portable",
}
RECORDED = ("native", "portable")
"""What the recorded table compares."""
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
"""Torch's libraries without AVX-512, and as fast as they are then."""

RESNET = ("data.image_size=64", "data.samples=512", "data.pool=64", "global_batch_size=32", "max_steps=8")
RESNET_OF_LARGE_IMAGES = ("data.samples=64", "data.pool=32", "global_batch_size=16", "max_steps=3")
EXPERIMENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "digits": ("digits", ("max_steps=220",)),
    "linear_regression": ("linear_regression", ("epochs=30",)),
    "toy_mlp": ("toy_mlp", ("epochs=60",)),
    "counter_buffer": ("counter_buffer", ("epochs=300",)),
    "char_transformer": ("char_transformer", ("max_steps=60",)),
    "char_transformer of 25 M parameters": (
        "char_transformer",
        ("model.width=512", "model.depth=8", "optimizer.lr=0.001", "max_steps=3"),
    ),
    "resnet18_synthetic": ("resnet18_synthetic", RESNET),
    "resnet18_synthetic, 224 x 224": ("resnet18_synthetic", RESNET_OF_LARGE_IMAGES),
}
"""By name: the experiment and its settings."""

OPERATIONS = {
    "product of 256 x 256 bfloat16 matrices": (
        "torch.randn(256, 256).bfloat16(), torch.randn(256, 256).bfloat16()",
        "torch.mm",
        2 * 256**3,
    ),
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
if {is_portable}:
    from ddp_core.numerics.kernels import portable_kernels
    block = portable_kernels()
    block.__enter__()
inputs, best = ({inputs}), float("inf")
for _ in range(12):
    start = time.perf_counter()
    {function}(*inputs)
    best = min(best, time.perf_counter() - start)
print({work} / best / 1e9)
"""


def train(name: str, way: str) -> float:
    """Samples per second of a run of its own."""
    experiment, settings = EXPERIMENTS[name]
    with tempfile.TemporaryDirectory(prefix="numerics-") as output:
        words = ["train", experiment, "--device", "cpu", "--numerics", WAYS[way], "--output", output]
        words += [word for each in settings for word in ("--set", each)]
        _run([sys.executable, "-m", "ddp_core", *words], AVX2 if way == HELD else {})
        (record,) = Path(output).glob("*/*/run.json")
        speed: float = json.loads(record.read_text())["result"]["samples_per_second"]
        return speed


def compute(operation: str, way: str) -> float:
    """10^9 operations with numbers per second, of the fastest of twelve calls."""
    inputs, function, work = OPERATIONS[operation]
    is_portable = WAYS[way] == "portable"
    script = TIMING.format(inputs=inputs, function=function, work=work, is_portable=is_portable)
    return float(_run([sys.executable, "-c", script], dict(LIMITS) if is_portable else AVX2 if way == HELD else {}))


def _run(words: list[str], variables: Mapping[str, str]) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in {*LIMITS, *AVX2}}
    environment = {**kept, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def measure(rounds: int, ways: Sequence[str], quick: bool) -> list[dict[str, Any]]:
    """All figures, printed as they come: by what is measured, the speed each way, and its ratio to the native one."""
    tasks = {name: ("samples/s", partial(train, name)) for name in EXPERIMENTS if not quick or name == "toy_mlp"}
    tasks |= {name: ("GFLOP/s", partial(compute, name)) for name in OPERATIONS}
    rows = []
    print(f"medians of {rounds} rounds in turns; speeds, and of native\n{'':54}{''.join(f'{way:>21}' for way in ways)}")
    for name, (unit, speed) in tasks.items():
        speeds: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(rounds):
            for way in rotated(ways, turn):
                speeds[way].append(speed(way))
        ratios = {way: median(map(truediv, speeds[way], speeds["native"])) for way in ways}
        medians = {way: median(speeds[way]) for way in ways}
        rows.append({"what": name, "unit": unit, **medians, "ratio": ratios[ways[-1]], "ratios": ratios})
        figures = "".join(f"{medians[way]:14.1f}  {ratios[way]:4.2f} " for way in ways)
        print(f"{name:54}{figures}  {unit}", flush=True)
    return rows


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=RECORDED, help="which to compare; native is first")
    parser.add_argument("--quick", action="store_true", help="one round of one experiment")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    from benchmarks.record import record  # it loads torch

    rounds = 1 if arguments.quick else arguments.rounds
    ways = ["native", *(way for way in arguments.ways if way != "native")]
    found = measure(rounds, ways, arguments.quick)
    if arguments.json or ways == list(RECORDED):
        print(record("numerics", "python -m benchmarks.numerics", found, arguments.json, rounds))


if __name__ == "__main__":
    main()
