"""What `--recovery live` costs where nothing fails: the steps of digits with it and with `restart`, in turns.

    python -m benchmarks.live_cost [--rounds 15] [--quick] [--json PATH]

digits for 25 epochs on ddp x 2, one thread for each process. `steps`: from the end of the first step to the end of the
last one, with evaluations and saves. `processor`: seconds of all processes of the command, its start included. Both
scatter by more than the goal, which is 0.5 % of a step: look at the quartiles. `own` is what a rank does in each step
for the sake of a live recovery, measured alone: it notes its position twice, and looks for one file.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.record import record
from benchmarks.trained import trained
from benchmarks.turns import rotated

WAYS = ("restart", "live")
DIGITS = ("digits", "--layout", "ddp", "--nproc-per-node", "2")
EPOCHS = 25
GOAL = 1.005
_REPEATS = 10_000


def timed(way: str, epochs: int) -> dict[str, float]:
    """Seconds of the steps of one run, and of the processor."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = trained((*DIGITS, "--set", f"epochs={epochs}", "--recovery", way))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    steps = run.record["total_steps"] - 1
    return {"steps": run.step_seconds, "step": run.step_seconds / steps, "processor": processor}


def own_seconds() -> float:
    """Seconds that a rank spends in each step for the sake of a live recovery."""
    from torch import nn, optim

    from ddp_core.distributed.seat import room_file
    from ddp_core.trainers.train_state import TrainState

    model = nn.Linear(1, 1)
    state = TrainState(model, optim.SGD(model.parameters()))
    with tempfile.TemporaryDirectory() as reports:
        file = room_file(Path(reports))
        began = time.perf_counter()
        for _ in range(_REPEATS):
            state.commit(is_settled=False)
            state.commit()
            os.path.exists(file)  # noqa: PTH110 - as in Seat.makes_room
        return (time.perf_counter() - began) / _REPEATS


def measure(rounds: int, epochs: int) -> dict[str, Any]:
    """All figures; prints the table."""
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for turn in range(rounds):
        for way in rotated(WAYS, turn):
            runs[way].append(timed(way, epochs))
    print(f"digits, {epochs} epochs of 22 steps, two ranks; medians of {rounds} rounds in turns, seconds")
    print(f"{'':12}{'restart':>10}{'live':>10}{'ratio':>9}{'quartiles':>18}   goal {GOAL}")
    table = {}
    for kind in ("steps", "processor"):
        ratios = [live[kind] / other[kind] for live, other in zip(runs["live"], runs["restart"], strict=True)]
        low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        table[kind] = {"ratio": median(ratios), "low": low, "high": high}
        restart, live = (median(run[kind] for run in runs[way]) for way in WAYS)
        print(f"{kind:12}{restart:10.2f}{live:10.2f}{median(ratios):9.4f}{low:9.4f} to {high:.4f}")
    own = own_seconds()
    share = own / median(run["step"] for run in runs["live"])
    print(f"own: {1e6 * own:.1f} us, {100 * share:.3f} % of a step")
    load = os.getloadavg()
    return {"load_average": load, **table, "own_seconds": own, "own_share": share, "rounds": runs}


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="a round of one epoch; recorded with --json only")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    epochs, rounds = (1, 1) if arguments.quick else (EPOCHS, arguments.rounds)
    results = measure(rounds, epochs)
    if arguments.json or not arguments.quick:
        command = f"python -m benchmarks.live_cost --rounds {rounds}"
        print(f"recorded in {record('live_cost', command, results, arguments.json, rounds)}")


if __name__ == "__main__":
    main()
