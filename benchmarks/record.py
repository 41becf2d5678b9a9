"""Write a benchmark's results with what is needed to judge them: the command, the machine and the versions."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from ddp_core.base.fingerprint import cpu_model
from ddp_core.record.environment import describe_code
from ddp_lab.records import record_text

RESULTS = Path(__file__).parent / "results"
NOT_YET = "not measured yet"
"""What a page has where a figure is not recorded."""
STAND_IN = "stand-in"
"""How the name of a device begins that no GPU is, but a test's stand-in for CUDA: its figures are nobody's."""


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Versions and hardware: plain values."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "gpus": gpus,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "torch_threads": torch.get_num_threads(),
    }


def is_stand_in(machine: Mapping[str, Any]) -> bool:
    """Whether a record's `machine` has a stand-in for CUDA among its devices."""
    return any(str(name).startswith(STAND_IN) for name in machine.get("gpus", ()))


def record(
    name: str,
    command: str | Sequence[str],
    results: Any,
    path: str | Path | None = None,
    rounds: int | None = None,
) -> Path:
    """Write `results` (anything JSON can hold) to `path`, by default benchmarks/results/NAME.json; return where.

    The file holds `benchmark`, `command`, `date` (UTC), `code` (version, commit, whether files were changed since),
    `load` (the averages of 1, 5 and 15 minutes at its end), `machine`, `rounds` and `results`. Rounds: how often each
    contender was measured, at least. Raises ValueError where it would be a published one, and a stand-in for CUDA was
    measured.
    """
    target = Path(path) if path is not None else RESULTS / f"{name}.json"
    if is_stand_in(measured := machine()) and target.resolve().is_relative_to(RESULTS.resolve()):
        raise ValueError(f"{target}: no GPU was measured, but a stand-in for CUDA; name a file elsewhere")
    content = {
        "benchmark": name,
        "command": command if isinstance(command, str) else " ".join(command),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "code": describe_code(),
        "load": [round(average, 2) for average in os.getloadavg()],
        "machine": measured,
        "rounds": rounds,
        "results": results,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(record_text(content) + "\n")
    return target


def measure_and_record(
    name: str, doc: str | None, measure: Callable[[int, int], Any], epochs: int, quick_epochs: int
) -> None:
    """The command line of a benchmark that trains `epochs` in each round: calls `measure(epochs, rounds)`, and records.

    `doc` is the text of its `--help`, and `quick_epochs` are those of `--quick`.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a short round; recorded with --json only")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    given = parser.parse_args()
    epochs, rounds = (quick_epochs, 1) if given.quick else (given.epochs, given.rounds)
    results = measure(epochs, rounds)
    if given.json or not given.quick:
        command = f"python -m benchmarks.{name} --epochs {epochs} --rounds {rounds}"
        print(f"recorded in {record(name, command, results, given.json, rounds)}")


def recorded(name: str) -> dict[str, Any] | None:
    """What `record` wrote to benchmarks/results/NAME.json; None where nothing is there."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def results_of(name: str) -> Any:
    """The `results` of benchmarks/results/NAME.json, which must be there."""
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]
