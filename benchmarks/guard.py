"""What rehearsal and witness cost: a training without them, with both, and where it was rehearsed before.

    python -m benchmarks.guard [--rounds 7] [--quick] [--json PATH]

digits for four epochs, and toy_mlp, on one process and on ddp x 2, one thread for each process, in turns: `off` with
`--rehearsal off`, `first` in an empty output folder, `again` where the same was rehearsed before. `steps`: from the end
of the first step to the end of the last one, with evaluations and saves. `whole`: the command. The goals: steps 1.005,
a second run 1.00, the first one 2 s more (toy_mlp 1.2 s).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import record
from benchmarks.trained import trained
from benchmarks.turns import rotated

WAYS = ("off", "first", "again")
LAYOUTS = {"single": ("--layout", "single"), "ddp x 2": ("--layout", "ddp", "--nproc-per-node", "2")}
TRAININGS = {"digits": ("digits", "--set", "epochs=4"), "toy_mlp": ("toy_mlp",)}


def timed(words: tuple[str, ...], way: str, known: Path) -> dict[str, float]:
    """Seconds of one run, and of its steps; `known` has the verdict of a rehearsal."""
    run = trained((*words, "--rehearsal", "off" if way == "off" else "on"), known if way == "again" else None)
    return {"whole": run.seconds, "steps": run.step_seconds}


def measure(rounds: int, is_quick: bool) -> dict[str, Any]:
    """All figures; prints the table."""
    table: dict[str, Any] = {}
    print(f"{'':18}{'whole, off':>11}{'first':>9}{'again':>9}{'first +':>9}{'again /':>9}{'steps /':>9}")
    for name, training in TRAININGS.items():
        for layout, where in LAYOUTS.items():
            words = (*training, *where, *(("--set", "max_steps=12") if is_quick else ()))
            runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            with tempfile.TemporaryDirectory() as known:
                timed(words, "again", Path(known))
                for turn in range(rounds):
                    for way in rotated(WAYS, turn):
                        runs[way].append(timed(words, way, Path(known)))
            whole = {way: median(run["whole"] for run in runs[way]) for way in WAYS}
            pairs = list(zip(runs["again"], runs["off"], strict=True))
            found = {
                "more_seconds_first": whole["first"] - whole["off"],
                "whole_again": median(one["whole"] / other["whole"] for one, other in pairs),
            }
            if name == "digits":  # a step of toy_mlp takes a millisecond
                found["steps_again"] = median(one["steps"] / other["steps"] for one, other in pairs)
            table[f"{name}, {layout}"] = found | {"rounds": runs}
            print(
                f"{name + ', ' + layout:18}{whole['off']:11.2f}{whole['first']:9.2f}{whole['again']:9.2f}"
                + "".join(f"{value:9.3f}" for value in found.values())
            )
    return {"trainings": table}


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a round of twelve steps; recorded with --json only")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    results = measure(rounds, arguments.quick)
    if arguments.json or not arguments.quick:
        command = f"python -m benchmarks.guard --rounds {rounds}"
        print(f"recorded in {record('guard', command, results, arguments.json, rounds)}")


if __name__ == "__main__":
    main()
