"""The sampler against torch's DistributedSampler: time to the first id, time per id, memory per rank, uniformity.

    python -m benchmarks.sampler [--quick] [--json PATH]

Each sampler and length is measured in a process of its own, as rank 0 of four. Memory is the growth of the peak
resident set (VmHWM) over what the process held before, after a warm-up at 100 samples. DistributedSampler at 10**8
samples takes some 15 seconds and 5 GB (--quick leaves it out); at 10**9 it is not run, and what it would need is
scaled from the longest run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from torch.utils.data import Dataset, DistributedSampler

from benchmarks.record import record
from benchmarks.uniformity import correlation, of_pairs, of_positions, pooled
from ddp_core.sampler import BLOCK, ElasticSampler, GlobalOrder, Permutation

WORLD_SIZE = 4
STEP = 64
WARM_UP = 100
# Enough for a steady time per id where an epoch is longer. DistributedSampler, whose cost sits in the first id, is
# timed over its whole epoch.
IDS_TIMED = 1_000_000


class Nothing(Dataset[int]):
    """A data set with a length and no data."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"this kernel reports no {field}")


def forget_peak() -> int:
    """Start VmHWM anew, so that it tells the growth from here; return the bytes held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def one_epoch(sampler: Any, limit: int | None) -> tuple[float, float]:
    """Seconds to the first id, and seconds per id over `limit` ids (all, where None), the first included."""
    start = time.perf_counter()
    ids = iter(sampler)
    next(ids)
    first = time.perf_counter() - start
    count = 1 + sum(1 for _ in islice(ids, None if limit is None else limit - 1))
    return first, (time.perf_counter() - start) / count


def measure_sampler(kind: str, length: int, repeats: int) -> dict[str, Any]:
    """Times and memory of one sampler. Runs in a process of its own."""
    sampler_class: Any = {"ElasticSampler": ElasticSampler, "DistributedSampler": DistributedSampler}[kind]
    limit = IDS_TIMED if kind == "ElasticSampler" else None
    one_epoch(sampler_class(Nothing(WARM_UP), WORLD_SIZE, 0), None)
    before = forget_peak()
    sampler = sampler_class(Nothing(length), WORLD_SIZE, 0)
    epochs = []
    for epoch in range(repeats):
        sampler.set_epoch(epoch)
        epochs.append(one_epoch(sampler, limit))
    return {
        "sampler": kind,
        "length": length,
        "repeats": repeats,
        "first_id_ms": 1e3 * median(first for first, _ in epochs),
        "ns_per_id": 1e9 * median(per_id for _, per_id in epochs),
        "memory_mb": (resident_bytes("VmHWM") - before) / 1e6,
    }


def first_batch(length: int, seed: int) -> float:
    """Seconds from nothing to the first ids."""
    start = time.perf_counter()
    GlobalOrder(length, seed).ids(0, 0, STEP)
    return time.perf_counter() - start


def per_id_in_blocks(length: int, seed: int) -> float:
    """Seconds per id of a permutation that is asked for a block at a time."""
    permutation, count = Permutation(length, (seed,)), min(length, IDS_TIMED)
    start = time.perf_counter()
    for begin in range(0, count, BLOCK):
        permutation(range(begin, min(begin + BLOCK, count)))
    return (time.perf_counter() - start) / count


def per_step(length: int, seed: int) -> float:
    """Seconds per step of a loop that asks for a few ids at a time."""
    order, steps = GlobalOrder(length, seed), min(length, IDS_TIMED) // STEP
    start = time.perf_counter()
    for step in range(steps):
        order.ids(0, step * STEP, (step + 1) * STEP)
    return (time.perf_counter() - start) / steps


def measure_order(length: int, repeats: int) -> dict[str, Any]:
    """The order in arrays, without Python integers, as the trainers use it. Runs in a process of its own."""
    per_step(WARM_UP, 0)
    before = forget_peak()
    return {
        "length": length,
        "repeats": repeats,
        "first_batch_ms": 1e3 * median(first_batch(length, seed) for seed in range(repeats)),
        "ns_per_id": 1e9 * median(per_id_in_blocks(length, seed) for seed in range(repeats)),
        "us_per_step_of_64": 1e6 * median(per_step(length, seed) for seed in range(repeats)),
        "memory_mb": (resident_bytes("VmHWM") - before) / 1e6,
    }


def in_fresh_process(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Call `function` in an interpreter started for it."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def uniformity(length: int, orders: int) -> dict[str, Any]:
    """Chi-square p-values over whole orders, pooled over `orders` epochs, and correlations of neighbouring orders."""
    tables: dict[str, list[tuple[float, int]]] = {}
    correlations: dict[str, list[float]] = {"epochs": [], "seeds": []}
    whole = range(length)
    before = Permutation(length, (0, orders))(whole)
    for epoch in range(orders):
        ids, beside = (Permutation(length, (seed, epoch))(whole) for seed in (0, 1))
        results = {
            "positions": of_positions(ids, length),
            "pairs, neighbours": of_pairs(ids[:-1], ids[1:], length),
            "pairs, 64 apart": of_pairs(ids[:-64], ids[64:], length),
            "neighbouring epochs": of_pairs(before, ids, length),
            "neighbouring seeds": of_pairs(beside, ids, length),
        }
        for name, parts in results.items():
            for part, table in parts.items():
                tables.setdefault(f"{name}: {part}", []).append(table)
        correlations["epochs"].append(correlation(before, ids))
        correlations["seeds"].append(correlation(beside, ids))
        before = ids
    return {
        "length": length,
        "orders": orders,
        "p_values": {name: pooled(several) for name, several in tables.items()},
        # Root mean square and largest, in standard errors: about 1, and about 2 to 3, where nothing is shared.
        "correlations": {
            name: {"rms": (sum(z * z for z in several) / orders) ** 0.5, "largest": max(several, key=abs)}
            for name, several in correlations.items()
        },
    }


def would_need(measured: dict[str, Any], length: int) -> dict[str, Any]:
    """DistributedSampler's figures at `length`, scaled from a shorter run: it holds a list entry for each sample."""
    factor = length / measured["length"]
    gigabytes, seconds = measured["memory_mb"] * factor / 1000, measured["first_id_ms"] * factor / 1000
    return {
        "sampler": "DistributedSampler",
        "length": length,
        "not_run": f"would need about {gigabytes:.1f} GB and {seconds:.0f} s (scaled from {measured['length']:.0e})",
    }


def print_tables(samplers: list[dict[str, Any]], orders: list[dict[str, Any]], uniform: dict[str, Any]) -> None:
    print(f"{'rank 0 of 4':<20}{'samples':>10}{'first id':>14}{'per id':>12}{'memory':>14}")
    for row in sorted(samplers, key=lambda row: (row["length"], row["sampler"])):
        head = f"{row['sampler']:<20}{row['length']:>10.0e}"
        if "not_run" in row:
            print(f"{head}   not run: {row['not_run']}")
        else:
            print(f"{head}{row['first_id_ms']:>11.2f} ms{row['ns_per_id']:>9.0f} ns{row['memory_mb']:>11.2f} MB")
    print(f"\n{'global order':<20}{'samples':>10}{'first 64':>14}{'per id':>12}{'memory':>14}{'per step of 64':>18}")
    for row in orders:
        print(
            f"{'':<20}{row['length']:>10.1e}{row['first_batch_ms']:>11.2f} ms{row['ns_per_id']:>9.1f} ns"
            f"{row['memory_mb']:>11.2f} MB{row['us_per_step_of_64']:>15.2f} us"
        )
    print(f"\nuniformity of {uniform['orders']} orders of {uniform['length']:.0e} samples: chi-square p-values")
    for name, p in uniform["p_values"].items():
        print(f"  {name:<36}{p:>7.3f}")
    for name, z in uniform["correlations"].items():
        print(f"  correlation of neighbouring {name}: rms {z['rms']:.2f}, largest {z['largest']:+.2f} standard errors")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampler", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="leave out DistributedSampler at 10**8 (15 s, 5 GB)")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    options = parser.parse_args()

    repeats = 5 if options.quick else 9
    lengths = [10**6, 10**8, 10**9]
    ours = [in_fresh_process(measure_sampler, "ElasticSampler", length, repeats) for length in lengths]
    theirs = [in_fresh_process(measure_sampler, "DistributedSampler", 10**6, repeats)]
    if not options.quick:
        theirs.append(in_fresh_process(measure_sampler, "DistributedSampler", 10**8, 1))
    longest = theirs[-1]
    theirs += [would_need(longest, length) for length in lengths if length > longest["length"]]
    orders = [in_fresh_process(measure_order, length, repeats) for length in [*lengths, 2**30 + 1, 10**12]]
    uniform = uniformity(10**6, 3 if options.quick else 20)

    print_tables([*ours, *theirs], orders, uniform)
    command = "python -m benchmarks.sampler" + (" --quick" if options.quick else "")
    results = {"samplers": [*ours, *theirs], "global_order": orders, "uniformity": uniform}
    print(f"\nwritten: {record('sampler', command, results, options.json, repeats)}")


if __name__ == "__main__":
    main()
