"""How long does a fault keep a run from training, and how many steps does it cost?

    python -m benchmarks.recovery [--trials 9] [--only FAULT] [--quick] [--json PATH]

Each trial starts a training of a small network over gloo, one worker on each of three nodes or three workers on one
node, saving every 4 steps; strikes between two steps at random (seeded); and waits for the first step that is done
after the resume. `seconds` runs from the fault to that step, and so holds the time to notice it, to meet again, and to
start the workers. For a fault that shows only as silence, `--timeout` (5 s) is part of it. `steps_lost` had to be done
again. The faults take turns, in an order that rotates.

With `--recovery live` the other workers go on. What joins or leaves with notice is no fault: its `seconds` runs from
the last step before it to the first one after it, and so holds one step, too.

A run strikes after its guard has rehearsed a resume, which takes seconds and happens once.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import record
from benchmarks.turns import rotated
from tests.faults.launches import Launch, Watch, launched, nodes, train_words
from tests.support.commands import wait_until

TIMEOUT = 5
RANKS = 3
LENGTH = ["--set", "epochs=400", "--timeout", str(TIMEOUT), "--max-restarts", "3"]
PAUSE = 0.006
LIVE = ["--recovery", "live"]
RESTART = ["--recovery", "restart"]
QUICK = ("worker joins, live",)
FIRST_STRIKE = 14
"""The guard rehearses the resume from the checkpoint of step 4, and waits for its verdict in step 12 at the latest."""


def one_node(output: Path, strike: Callable[[Launch], object], *way: str) -> tuple[float, int]:
    """Seconds and steps that a fault in a launch of one node costs."""
    with launched(*train_words(output, *LENGTH, *(way or RESTART), ranks=RANKS), pause=PAUSE) as launch:
        return _strike(Watch(output), lambda: strike(launch))


def joins(output: Path) -> tuple[float, int]:
    """How long the others stand still when a new worker joins them, and how many steps they do again."""
    watch = Watch(output)
    with launched(*train_words(output, *LENGTH, *LIVE, ranks=RANKS), pause=PAUSE) as launch:
        _strike(watch, lambda: kill_worker(launch))
        return _pause(watch, 1)


def node_joins(output: Path) -> tuple[float, int]:
    """That time when a new node joins two."""
    watch = Watch(output)
    with nodes(3, output, *LENGTH, *LIVE, pause=PAUSE) as (launches, start, _):
        _strike(watch, lambda: kill_node(2)(launches, None))
        start()
        return _pause(watch, 1)


def node_leaves(output: Path) -> tuple[float, int]:
    """That time when one of three nodes is asked to leave."""
    watch = Watch(output)
    with nodes(3, output, *LENGTH, *LIVE, pause=PAUSE) as (launches, _, _):
        _await_strike(watch)
        _with_rank(2, launches).signal(signal.SIGTERM)
        return _pause(watch, 0)


def _pause(watch: Watch, number: int) -> tuple[float, int]:
    """Seconds without a step around the change of this number, and how many steps it lets the ranks do again."""
    wait_until(lambda: len(watch.records("resume")) > number, 60, "the ranks meet anew")
    change = watch.records("resume")[number]
    watch.wait_for_step(change["step"] + 2)
    steps = watch.records("step")
    before = [found for found in steps if found["time"] < change["time"] and "data_wait" in found][-1]
    after = next(found for found in steps if found["step"] > change["step"])
    return after["time"] - before["time"], max(0, int(before["step"] - change["step"]))


def three_nodes(output: Path, strike: Callable[[list[Launch], Any], object], *way: str) -> tuple[float, int]:
    """Seconds and steps that a fault costs in a launch of three nodes that may go on with fewer."""
    with nodes(3, output, *LENGTH, *(way or RESTART), pause=PAUSE) as (launches, _, store):
        return _strike(Watch(output), lambda: strike(launches, store))


def _strike(watch: Watch, strike: Callable[[], object]) -> tuple[float, int]:
    _await_strike(watch)
    struck = time.time()
    strike()
    # The step that was under way may still be written down.
    seconds = watch.wait_for_new_step(struck)
    resume = next(found for found in watch.records("resume") if found["time"] > struck)
    done = max(found["step"] for found in watch.records("step") if found["time"] < resume["time"])
    return seconds, max(0, done - int(resume["step"]))


def _await_strike(watch: Watch) -> None:
    watch.wait_for_step(FIRST_STRIKE)
    time.sleep(random.uniform(0, 0.5))


def kill_worker(launch: Launch) -> None:
    launch.workers()[1].kill()


def kill_rank_0(launch: Launch) -> None:
    launch.workers()[0].kill()


def stop_worker(launch: Launch) -> None:
    launch.workers()[1].suspend()


def kill_node(rank: int) -> Callable[[list[Launch], Any], None]:
    return lambda launches, _: _with_rank(rank, launches).kill()


def stop_node(rank: int) -> Callable[[list[Launch], Any], None]:
    """As where a node is unplugged, no connection closes."""
    return lambda launches, _: _with_rank(rank, launches).signal_all(signal.SIGSTOP)


def _with_rank(rank: int, launches: list[Launch]) -> Launch:
    return next(launch for launch in launches if rank in launch.workers())


def restart_rendezvous(launches: list[Launch], store: Any) -> None:
    store.kill()
    wait_until(lambda: all("trying again" in launch.said()[1] for launch in launches), 60, "the loss is noticed")
    store.start()


FAULTS: dict[str, Callable[[Path], tuple[float, int]]] = {
    "worker killed": lambda output: one_node(output, kill_worker),
    "worker killed, live": lambda output: one_node(output, kill_worker, *LIVE),
    "rank 0 killed": lambda output: one_node(output, kill_rank_0),
    "rank 0 killed, live": lambda output: one_node(output, kill_rank_0, *LIVE),
    "worker joins, live": joins,
    "worker stopped": lambda output: one_node(output, stop_worker),
    "node killed": lambda output: three_nodes(output, kill_node(2)),
    "node killed, live": lambda output: three_nodes(output, kill_node(2), *LIVE),
    "node of rank 0 killed": lambda output: three_nodes(output, kill_node(0)),
    "node of rank 0 killed, live": lambda output: three_nodes(output, kill_node(0), *LIVE),
    "node joins, live": node_joins,
    "node leaves with notice, live": node_leaves,
    "node of rank 0 stopped": lambda output: three_nodes(output, stop_node(0)),
    "node stopped, live": lambda output: three_nodes(output, stop_node(2), *LIVE),
    "rendezvous killed, started again when noticed": lambda output: three_nodes(output, restart_rendezvous),
}


def measure(names: Sequence[str], trials: int) -> dict[str, Any]:
    """These faults, several times each, in turns; prints the table."""
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
    for trial in range(trials):
        for name in rotated(names, trial):
            with tempfile.TemporaryDirectory(prefix="ddp-recovery-") as output:
                found[name].append(FAULTS[name](Path(output)))
    results = {}
    for name, costs in found.items():
        seconds, lost = [round(each, 3) for each, _ in costs], [steps for _, steps in costs]
        results[name] = {"seconds": seconds, "median": median(seconds), "worst": max(seconds), "steps_lost": lost}
        print(f"{name:46} median {median(seconds):6.2f} s   worst {max(seconds):6.2f} s   steps lost {lost}")
    return results


def main() -> int:
    """Measure, print, and write benchmarks/results/recovery.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--only", choices=sorted(FAULTS), action="append")
    parser.add_argument("--quick", action="store_true", help=f"one trial of a few faults ({'; '.join(QUICK)})")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    options = parser.parse_args()
    random.seed(0)
    load = os.getloadavg()[0]
    names, trials = (QUICK, 1) if options.quick else (options.only or list(FAULTS), options.trials)
    results = measure(names, trials)
    settings = {"timeout": TIMEOUT, "checkpoint_every": 4, "load_before": round(load, 2)}
    if options.json or set(names) == set(FAULTS):
        command = f"python -m benchmarks.recovery --trials {trials}"
        found = {"settings": settings, "faults": results}
        print(f"recorded in {record('recovery', command, found, options.json, trials)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
