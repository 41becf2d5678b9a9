"""A whole run, from the command to its end: `ddp train digits` beside a bare script that makes the same steps.

    python -m benchmarks.whole_run [--epochs 25] [--rounds 5] [--quick] [--json PATH]

Both are started as commands of their own and train the same CNN on scikit-learn's digits in one process with one
thread: the same batches of 64, epochs, optimizer and schedule, an evaluation and a checkpoint per epoch, no
augmentation. They take turns, in an order that rotates. `plain` computes a batch as the script does; `exact` is the
experiment as it is shipped, whose batches are cut into eight micro-batches. Eight small ones cost more than a large one
whoever computes them, so a second script accumulates the same eight, and the target is for the ratio to that one.
Numerics are native, as those of a script.

start: until the first step is done (Python, imports, data, run directory). steps: to the last step's end, with the
evaluations and checkpoints between epochs. after: the last evaluation, digest and checkpoint, until on disk. end: until
the command has returned. `ddp train` writes a line for each step (`--log-every 1`), from which these times are read;
the bare script makes no digest, log, record or manifest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import measure_and_record
from benchmarks.turns import rotated

PHASES = ("start", "steps", "after", "end", "whole")
SETTINGS = ("data.augment=false",)
STEPS = ("steps_ratio", "steps_ratio_to_accumulating")
"""Where a record has how long a way's steps alone take, of those of each bare script."""
TARGET = 1.05
"""The ratio of exact to the bare script with the same micro-batches."""
SCRIPT, ACCUMULATING, EXACT = "bare script", "bare script, accumulating", "ddp train, exact"
SCRIPTS: dict[str, tuple[str, ...]] = {SCRIPT: (), ACCUMULATING: ("8",)}
COMMANDS: dict[str, tuple[str, ...]] = {
    "ddp train, plain": ("--numerics", "native", "--reduction", "plain", "--set", "micro_batch=null"),
    EXACT: ("--numerics", "native", "--reduction", "exact"),
}
WAYS = (*SCRIPTS, *COMMANDS)


def timed(way: str, epochs: int) -> dict[str, float]:
    """Seconds of each phase of one run."""
    with tempfile.TemporaryDirectory() as place:
        if way in SCRIPTS:
            words = [str(Path(__file__).with_name("bare_digits.py")), str(epochs), str(Path(place, "weights.pt"))]
            words += SCRIPTS[way]
        else:
            words = ["-m", "ddp_core", "train", "digits", "--layout", "single", "--device", "cpu", "--log-every", "1"]
            words += ["--output", place, *COMMANDS[way], "--set", f"epochs={epochs}"]
            words += [word for setting in SETTINGS for word in ("--set", setting)]
        began = time.time()
        done = subprocess.run(
            [sys.executable, *words],
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        ended = time.time()
        first, last, saved = _times_of_script(done.stdout) if way in SCRIPTS else _times_of_run(Path(place))
    phases = (first - began, last - first, saved - last, ended - saved, ended - began)
    return dict(zip(PHASES, phases, strict=True))


def _times_of_script(said: str) -> tuple[float, float, float]:
    times = json.loads(said.splitlines()[-1])
    return times["first_step"], times["last_step"], times["saved"]


def _times_of_run(place: Path) -> tuple[float, float, float]:
    (path,) = place.glob("digits/*/metrics.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [entry["time"] for entry in records if entry["kind"] == "step"]
    return steps[0], steps[-1], max(entry["time"] for entry in records)


def measure(epochs: int, rounds: int) -> dict[str, Any]:
    """All figures; prints the table."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for turn in range(rounds):
        for way in rotated(WAYS, turn):
            found[way].append(timed(way, epochs))
    print(f"digits, {epochs} epochs of 22 steps, one process, one thread; medians of {rounds} rounds in turns, seconds")
    print(f"{'':26}" + "".join(f"{phase:>9}" for phase in PHASES) + f"{'of the bare script':>20}{'accumulating':>14}")
    table = {}
    for way, runs in found.items():
        medians = {phase: median(run[phase] for run in runs) for phase in PHASES}
        of_script, of_accumulating = (ratio(runs, found[base]) for base in SCRIPTS)
        of_steps = {name: ratio(runs, found[base], "steps") for name, base in zip(STEPS, SCRIPTS, strict=True)}
        table[way] = {"medians": medians, "ratio": of_script, "ratio_to_accumulating": of_accumulating, **of_steps}
        table[way]["rounds"] = runs
        target = f"   target {TARGET}" if way == EXACT else ""
        print(
            f"{way:26}{''.join(f'{medians[phase]:9.2f}' for phase in PHASES)}"
            f"{of_script:19.2f}x{of_accumulating:13.2f}x{target}"
        )
    return {"epochs": epochs, "target": TARGET, "ways": table}


def ratio(runs: list[dict[str, float]], base: list[dict[str, float]], phase: str = "whole") -> float:
    """How long a phase takes, of that of another way: the median over the rounds."""
    return median(run[phase] / other[phase] for run, other in zip(runs, base, strict=True))


if __name__ == "__main__":
    measure_and_record("whole_run", __doc__, measure, epochs=25, quick_epochs=1)
