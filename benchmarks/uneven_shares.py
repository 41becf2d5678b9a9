"""Two ranks of which one has half a core: steps in equal shares, and in those of `--shares`.

    python -m benchmarks.uneven_shares [--rounds 5] [--epochs 20] [--quick] [--json PATH]

Each rank is pinned to a core of its own, and rank 1 shares its core with a program that computes without end. A step of
96 samples is cut into 24 micro-batches, so that ideal shares are 16 and 8, and take 16 of the 24 units that equal
shares take on the slow rank: 1.5 times the speed. Steps are counted from the 30th on. The ways take turns, in an order
that rotates. All must end with the same weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import measure_and_record
from benchmarks.turns import rotated
from ddp_core.distributed.world import World, free_port

WAYS: dict[str, tuple[str, ...]] = {
    "equal shares": (),
    "--shares auto": ("--shares", "auto"),
    "--shares 2,1": ("--shares", "2,1"),
}
IDEAL = 1.5
_FIRST = 30
_SETTINGS = ("global_batch_size=96", "micro_batch=4", "data.augment=false")


def timed(way: str, epochs: int) -> dict[str, Any]:
    """Seconds per step, and the digest of the weights."""
    with tempfile.TemporaryDirectory() as place:
        words = ["-m", "ddp_core", "train", "digits", "--layout", "ddp", "--device", "cpu", "--numerics", "native"]
        words += ["--log-every", "1", "--output", place, *WAYS[way]]
        words += [word for setting in (*_SETTINGS, f"epochs={epochs}") for word in ("--set", setting)]
        port, ranks = free_port(), []
        for rank in range(2):
            world = World(rank, 2, rank, 2, store_host="127.0.0.1", store_port=port)
            own: dict[str, Any] = {"env": os.environ | world.to_environment() | {"OMP_NUM_THREADS": "1"}}
            ranks.append(_start([sys.executable, *words], rank, **own))
        codes = [process.wait() for process in ranks]
        if any(codes):
            raise RuntimeError(f"{way}: a rank has failed")
        (run,) = Path(place).glob("digits/*")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        digest = json.loads((run / "run.json").read_text())["weights_sha256"]
    times = [line["time"] for line in lines if line["kind"] == "step"][_FIRST:]
    return {"step": (times[-1] - times[0]) / (len(times) - 1), "weights_sha256": digest}


def _start(words: list[str], core: int, **how: Any) -> subprocess.Popen[bytes]:
    pinned = partial(os.sched_setaffinity, 0, {sorted(os.sched_getaffinity(0))[core]})
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, preexec_fn=pinned, **how)


def measure(epochs: int, rounds: int) -> dict[str, Any]:
    """All figures; prints the table."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    other = _start([sys.executable, "-c", "while True: pass"], core=1)
    try:
        for turn in range(rounds):
            for way in rotated(WAYS, turn):
                found[way].append(timed(way, epochs))
    finally:
        other.kill()
    if len(digests := {run["weights_sha256"] for runs in found.values() for run in runs}) > 1:
        raise RuntimeError(f"other weights: {sorted(digests)}")
    print(f"{'':16}{'ms per step':>12}{'times as fast':>15}   (ideal {IDEAL}; medians of {rounds} rounds)")
    base, table = found["equal shares"], {}
    for way, runs in found.items():
        faster = [first["step"] / run["step"] for first, run in zip(base, runs, strict=True)]
        table[way] = {"step": median(run["step"] for run in runs), "faster": median(faster), "rounds": runs}
        print(f"{way:16}{1000 * table[way]['step']:12.1f}{table[way]['faster']:15.2f}")
    return {"epochs": epochs, "ideal": IDEAL, "ways": table}


if __name__ == "__main__":
    measure_and_record("uneven_shares", __doc__, measure, epochs=20, quick_epochs=3)
