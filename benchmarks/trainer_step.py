"""A training step of this project against bare loops and against three peers, one thread each.

    python -m benchmarks.trainer_step [--rounds 11] [--case NAME ...] [--no-peers] [--quick] [--json PATH]

Every contender is a process of its own, and they take turns. Each figure is the ratio to the bare loop's time in the
same round, as the median over the rounds. For a machine that others disturb there are also the ratio of the fastest
turns, and that of the processor's time. The bare loop is that of source 003; others do step by step what makes ours
quicker, with torch's own means, and the target is for the ratio to the fastest of them. Ours is the real
`Trainer.train()` with metrics, log, progress bar, heartbeat, check for NaN, stop request and checkpoint schedule on.
The guard is off: it compares ranks in the first steps of a run, of which a turn has too many, and `benchmarks.guard`
measures it over whole runs. The peers run with as little as possible, and are measured where they are installed:
pip install -e '.[peers]'.
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

from benchmarks.compared import BEST_LOOP_TARGET
from benchmarks.loops import PEERS, Case, Tuning, bare, bare_accumulating, ours
from benchmarks.record import record
from benchmarks.turns import Turn, best_bare, summary, take_turns

CASES = {
    "resnet18": Case(
        "ResNet-18, 32x32, batch 16, in memory", "resnet18", (3, 32, 32), 16, 6, False, target=BEST_LOOP_TARGET
    ),
    "mlp": Case("MLP 64-64-10, batch 64, from a data set", "mlp", (64,), 64, 250, True, target=BEST_LOOP_TARGET),
    "resnet18-exact": Case(
        "ResNet-18, 32x32, batch 64 in micro-batches of 16, exact", "resnet18", (3, 32, 32), 64, 3, False, 16
    ),
    "mlp-exact": Case("MLP 64-64-10, batch 64 in micro-batches of 16, exact", "mlp", (64,), 64, 100, True, 16),
}
BARE = {
    "bare loop": Tuning(),
    "bare, memory kept": Tuning(keep_memory=True),
    "bare, fused, memory kept": Tuning(keep_memory=True, fused=True),
}
SELECTING = {
    "bare, index_select": Tuning(index_select=True),
    "bare, index_select, fused, memory kept": Tuning(keep_memory=True, fused=True, index_select=True),
}
"""Where batches come from a `DataLoader` otherwise."""
QUICK = {"resnet18": 1, "mlp": 20, "resnet18-exact": 1, "mlp-exact": 5}


def contenders(case: Case, peers: bool) -> dict[str, tuple[Callable[..., Turn], Sequence[Any]]]:
    """The contenders of a case by name, the bare loop first; prints which peers are not installed."""
    loop = bare if case.micro_batch is None else bare_accumulating
    tunings = BARE | (SELECTING if case.data_loader else {})
    found: dict[str, tuple[Callable[..., Turn], Sequence[Any]]] = {
        name: (loop, [case, tuning]) for name, tuning in tunings.items()
    }
    if case.micro_batch is not None:
        return found | {"ours, plain": (ours, [case]), "ours, exact": (ours, [case, "exact"])}
    found |= {"ours": (ours, [case]), "ours, optimizer in a loop": (ours, [case, "plain", "loop"])}
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
        print(f"  {'':38} {'a step':>13}   {'ratio (quartiles)':>24}   {'fastest':>8}   {'processor':>9}")
        for contender, row in table.items():
            print(f"  {contender:38} {row['microseconds']:10.1f} us   {_ratios(row, processor[contender])}")
        own = {contender: turns for contender, turns in seconds.items() if "run" in turns[0]}
        best = best_bare(seconds)
        of_best, processor_of_best = summary(seconds, base=best), summary(seconds, "cpu", best)
        print(f"  to the best bare loop ({best}):")
        for contender in own:
            target = f"   target {case.target}" if contender == "ours" and case.target else ""
            ratios = _ratios(of_best[contender], processor_of_best[contender])
            print(f"  {contender:38} {'':13}   {ratios}{target}")
        print("  with first step, digest and checkpoint on disk:")
        for contender, turns in own.items():
            print(f"  {contender:38} {median(1e6 * turn['run'] for turn in turns):10.1f} us")
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


def _ratios(wall: dict[str, float], processor: dict[str, float]) -> str:
    return (
        f"{wall['ratio']:6.3f}x  ({wall['low']:.3f} to {wall['high']:.3f})   {wall['fastest']:7.3f}x   "
        f"{processor['ratio']:8.3f}x"
    )


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
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
        command = f"python -m benchmarks.trainer_step --rounds {rounds} --case {' '.join(arguments.case)}"
        print(record("trainer_step", command, results, arguments.json, rounds))


if __name__ == "__main__":
    main()
