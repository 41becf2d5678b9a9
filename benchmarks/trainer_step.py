"""A training step of this project against the bare loop and against three peers, one thread each.

    python -m benchmarks.trainer_step [--rounds 21] [--case NAME ...] [--no-peers] [--quick] [--json PATH]

Every contender is a process of its own, and they take turns. Each figure is the ratio to the bare loop's time in the
same round, as the median over the rounds. For a machine that others disturb there are also the ratio of the fastest
turns, and that of the processor's time. Ours is the real `Trainer.train()` with metrics, log, progress bar, heartbeat,
NaN guard, stop request and checkpoint schedule on. The peers run with as little as possible, and are measured where
they are installed: pip install -e '.[peers]'.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.loops import PEERS, Case, bare, bare_accumulating, ours
from benchmarks.record import record
from benchmarks.turns import Turn, summary, take_turns

CASES = {
    "resnet18": Case("ResNet-18, 32x32, batch 16, in memory", "resnet18", (3, 32, 32), 16, 6, False, target=1.0),
    "mlp": Case("MLP 64-64-10, batch 64, DataLoader on the other sides", "mlp", (64,), 64, 250, True, target=0.6),
    "resnet18-exact": Case(
        "ResNet-18, 32x32, batch 64 in micro-batches of 16, exact", "resnet18", (3, 32, 32), 64, 3, False, 16
    ),
    "mlp-exact": Case("MLP 64-64-10, batch 64 in micro-batches of 16, exact", "mlp", (64,), 64, 100, True, 16),
}
QUICK = {"resnet18": 1, "mlp": 20, "resnet18-exact": 1, "mlp-exact": 5}


def contenders(case: Case, peers: bool) -> dict[str, tuple[Callable[..., Turn], Sequence[Any]]]:
    """The contenders of a case by name, the bare loop first; prints which peers are not installed."""
    if case.micro_batch is not None:
        return {
            "bare loop": (bare_accumulating, [case]),
            "ours, plain": (ours, [case]),
            "ours, exact": (ours, [case, "exact"]),
        }
    found: dict[str, tuple[Callable[..., Turn], Sequence[Any]]] = {"bare loop": (bare, [case]), "ours": (ours, [case])}
    found["ours, optimizer in a loop"] = (ours, [case, "plain", "loop"])
    found["bare loop, memory kept"] = (bare, [case, True])
    for name, (package, build) in PEERS.items() if peers else ():
        if importlib.util.find_spec(package) is None:
            print(f"{name}: not installed: pip install {package}")
        else:
            found[f"{name} {importlib.metadata.version(package)}"] = (build, [case])
    return found


def measure(names: Sequence[str], rounds: int, peers: bool = True, quick: bool = False) -> list[dict[str, Any]]:
    """One record per case, printed as they come."""
    results = []
    for name in names:
        case = replace(CASES[name], steps=QUICK[name]) if quick else CASES[name]
        print(f"\n{case.title}; {case.steps} steps a turn, medians of {rounds} rounds")
        seconds = take_turns(contenders(case, peers), rounds)
        table, processor = summary(seconds), summary(seconds, "cpu")
        print(f"  {'':24} {'a step':>13}   {'ratio (quartiles)':>24}   {'fastest':>8}   {'processor':>9}")
        for contender, row in table.items():
            target = f"   target {case.target}" if contender == "ours" and case.target else ""
            print(
                f"  {contender:24} {row['microseconds']:10.1f} us   {row['ratio']:6.3f}x  "
                f"({row['low']:.3f} to {row['high']:.3f})   {row['fastest']:7.3f}x   "
                f"{processor[contender]['ratio']:8.3f}x{target}"
            )
        for contender, turns in seconds.items():
            if "run" in turns[0]:
                whole = median(1e6 * turn["run"] for turn in turns)
                print(f"  {contender:24} {whole:10.1f} us   with first step, digest and checkpoint on disk")
        results.append(
            {
                "case": name,
                "title": case.title,
                "target": case.target,
                "wall": table,
                "processor": processor,
                "turns": seconds,
            }
        )
    return results


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument(
        "--quick", action="store_true", help="a round of few steps, to see that it runs; recorded with --json only"
    )
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    results = measure(arguments.case, rounds, not arguments.no_peers, arguments.quick)
    if arguments.json or not arguments.quick:
        print(record("trainer_step", "python -m benchmarks.trainer_step", results, arguments.json))


if __name__ == "__main__":
    main()
