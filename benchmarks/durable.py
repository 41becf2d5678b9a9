"""What it costs that a run survives a power cut: its start and its end, with and without waiting for the disk.

    python -m benchmarks.durable [--rounds 21] [--quick] [--directory DIR] [--json PATH]

start: the run directory, the fence, five files of code, run.json. end: model.safetensors of ResNet-18 (47 MB) and
run.json. save: what a checkpoint's commit waits for beside its own files, metrics.jsonl with 100 new lines and log.txt.
"without" is the same code with an fsync that does nothing. Both take turns; seconds are medians.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest import mock

from benchmarks.record import record
from ddp_core.base.files import sync
from ddp_core.checkpoint import Fence
from ddp_core.config.experiment import Component, Experiment
from ddp_core.config.layout import Layout
from ddp_core.experiment.source import FOLDER, Source
from ddp_core.model.builders import resnet18
from ddp_core.record.directory import RunDirectory
from ddp_core.record.result import save_weights

EXPERIMENT = Experiment(name="durable", model=Component(name="m"), data=Component(name="d"), global_batch_size=8)
SOURCE = Source("e.py", {f"m{number}.py": b"value = 1\n" * 200 for number in range(5)}, {})
RECORD = {"filling": ["a" * 60] * 80}


def phases(output: Path, weights: dict[str, Any]) -> dict[str, float]:
    """Seconds of each phase of a run in a new directory."""
    seconds = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        seconds[name] = time.perf_counter() - began
        return result

    def start() -> tuple[RunDirectory, Fence]:
        directory = RunDirectory.create(output, EXPERIMENT, Layout())
        fence = Fence.take(directory.path)
        SOURCE.write(directory.path / FOLDER)
        directory.write(RECORD)
        return directory, fence

    def end() -> None:
        save_weights(weights, directory.path / "model.safetensors", fence)
        directory.write(RECORD)

    directory, fence = timed("start", start)
    with directory.metrics.open("a") as metrics, directory.log.open("a") as log:
        metrics.write('{"kind": "step", "filling": "as long as a line is"}\n' * 100)
        log.write("a line\n")

    def save() -> None:
        for path in (directory.path, directory.metrics, directory.log):
            sync(path)

    timed("save", save)
    timed("end", end)
    return seconds


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--directory", type=Path, help="on the disk to measure (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    options = parser.parse_args()
    rounds = 2 if options.quick else options.rounds
    weights = resnet18(classes=1000).state_dict()
    found: dict[str, list[dict[str, float]]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for _ in range(rounds):
            found["with"].append(phases(Path(folder), weights))
            with mock.patch.object(os, "fsync"):
                found["without"].append(phases(Path(folder), weights))
    results: dict[str, Any] = {"load_average": os.getloadavg(), "rounds": rounds}
    for phase in ("start", "save", "end"):
        ways = {way: [1000 * each[phase] for each in seconds] for way, seconds in found.items()}
        results[phase] = {f"{way} (ms)": [median(each), *quantiles(each, n=4)[::2]] for way, each in ways.items()}
        middle = {way: median(each) for way, each in ways.items()}
        print(f"{phase:6}{middle['with']:9.2f} ms, without waiting {middle['without']:7.2f} ms")
    command = f"python -m benchmarks.durable --rounds {rounds}"
    print(f"recorded in {record('durable', command, results, options.json, rounds)}")


if __name__ == "__main__":
    main()
