"""How long does a fault keep a run from training, and how many steps does it cost?

    python -m benchmarks.recovery [--trials 5]

Each trial starts a training of a small network over gloo, one worker per node or two on one node, saving every 4 steps;
strikes between two steps at random (seeded); and waits for the first step that is done after the resume. `seconds`
runs from the fault to that step, and so holds the time to notice it, to meet again, and to start the workers.
For a fault that shows only as silence, `--timeout` (5 s) is part of it. `steps_lost` had to be done again.

With `--recovery live` the other worker goes on, and a new one joins it: there, `seconds` runs from the last step before
the join to the first one after it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import record
from tests.faults.launches import Launch, Watch, nodes, train_words
from tests.support.commands import wait_until

TIMEOUT = 5
LENGTH = ["--set", "epochs=400", "--timeout", str(TIMEOUT), "--max-restarts", "3"]
PAUSE = 0.006
LIVE = ["--recovery", "live"]


def one_node(output: Path, strike: Callable[[Launch], object]) -> tuple[float, int]:
    """Seconds and steps that a fault in a launch of two workers costs."""
    with Launch(*train_words(output, *LENGTH), pause=PAUSE) as launch:
        return _strike(Watch(output), lambda: strike(launch))


def goes_on(output: Path) -> tuple[float, int]:
    """The same where one of two workers is killed and the other one goes on."""
    with Launch(*train_words(output, *LENGTH, *LIVE), pause=PAUSE) as launch:
        return _strike(Watch(output), lambda: kill_worker(launch))


def joins(output: Path) -> tuple[float, int]:
    """How long a worker stands still when a new one joins it, and how many steps it does again."""
    watch = Watch(output)
    with Launch(*train_words(output, *LENGTH, *LIVE), pause=PAUSE) as launch:
        _strike(watch, lambda: kill_worker(launch))
        wait_until(lambda: len(watch.records("resume")) > 1, 60, "a new worker joins")
        joined = watch.records("resume")[1]
        watch.wait_for_step(joined["step"] + 2)
        steps = watch.records("step")
    before = [found for found in steps if found["time"] < joined["time"] and "data_wait" in found][-1]
    after = next(found for found in steps if found["step"] > joined["step"])
    return after["time"] - before["time"], max(0, int(before["step"] - joined["step"]))


def three_nodes(output: Path, strike: Callable[[list[Launch], Any], object]) -> tuple[float, int]:
    """The same in a launch of three nodes that may go on with fewer."""
    with nodes(3, output, *LENGTH, pause=PAUSE) as (launches, _, store):
        return _strike(Watch(output), lambda: strike(launches, store))


def _strike(watch: Watch, strike: Callable[[], object]) -> tuple[float, int]:
    watch.wait_for_step(10)
    time.sleep(random.uniform(0, 0.5))
    struck = time.time()
    strike()
    # The step that was under way may still be written down.
    seconds = watch.wait_for_new_step(struck)
    resume = next(found for found in watch.records("resume") if found["time"] > struck)
    done = max(found["step"] for found in watch.records("step") if found["time"] < resume["time"])
    return seconds, max(0, done - int(resume["step"]))


def kill_worker(launch: Launch) -> None:
    launch.workers()[1].kill()


def stop_worker(launch: Launch) -> None:
    launch.workers()[1].suspend()


def kill_node(rank: int) -> Callable[[list[Launch], Any], None]:
    def strike(launches: list[Launch], _: Any) -> None:
        next(launch for launch in launches if rank in launch.workers()).kill()

    return strike


def stop_node(launches: list[Launch], _: Any) -> None:
    next(launch for launch in launches if 0 in launch.workers()).signal_all(signal.SIGSTOP)


def restart_rendezvous(launches: list[Launch], store: Any) -> None:
    store.kill()
    wait_until(lambda: all("trying again" in launch.errors() for launch in launches), 60, "the loss is noticed")
    store.start()


FAULTS: dict[str, Callable[[Path], tuple[float, int]]] = {
    "worker killed": lambda output: one_node(output, kill_worker),
    "worker killed, the other goes on": goes_on,
    "new worker joins": joins,
    "worker stopped": lambda output: one_node(output, stop_worker),
    "node killed": lambda output: three_nodes(output, kill_node(2)),
    "node of rank 0 killed": lambda output: three_nodes(output, kill_node(0)),
    "node of rank 0 stopped": lambda output: three_nodes(output, stop_node),
    "rendezvous killed, started again when noticed": lambda output: three_nodes(output, restart_rendezvous),
}


def measure(name: str, trials: int) -> dict[str, Any]:
    """One fault, several times."""
    seconds, lost = [], []
    for _ in range(trials):
        with tempfile.TemporaryDirectory(prefix="ddp-recovery-") as output:
            one, steps = FAULTS[name](Path(output))
        seconds.append(round(one, 2))
        lost.append(steps)
    result = {"seconds": seconds, "median": median(seconds), "worst": max(seconds), "steps_lost": lost}
    figures = f"median {result['median']:6.2f} s   worst {result['worst']:6.2f} s   steps lost {lost}"
    print(f"{name:46} {figures}", flush=True)
    return result


def main() -> int:
    """Measure, print, and write benchmarks/results/recovery.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--only", choices=sorted(FAULTS), action="append")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    options = parser.parse_args()
    random.seed(0)
    load = os.getloadavg()[0]
    results = {name: measure(name, options.trials) for name in options.only or FAULTS}
    settings = {"timeout": TIMEOUT, "checkpoint_every": 4, "load_before": round(load, 2)}
    found = {"settings": settings, "faults": results}
    print(record("recovery", "python -m benchmarks.recovery", found, options.json, options.trials))
    return 0


if __name__ == "__main__":
    sys.exit(main())
