"""What collectives and steps cost on this machine: measured, fitted, and checked on points held out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from ddp_lab.claims.framework.setting import usable_cores
from ddp_lab.projection.fit import TARGET, Check, Fitted, check, fit, split
from ddp_lab.projection.measure import COLLECTIVES, hidden_share, measure_collectives, measure_steps
from ddp_lab.projection.spread import expected_maximum

KIB, MIB = 1024, 1024 * 1024
SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB)
HELD_OUT_SIZES = (16 * KIB, 512 * KIB, 2 * MIB, 8 * MIB)
PROCESSES, HELD_OUT_PROCESSES = (2, 3, 4), 3


def measure_here(rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure and fit on this machine; prints the results with `say` and returns them."""
    cores, load = usable_cores(), os.getloadavg()[0]
    points = measure_collectives(PROCESSES, SIZES, rounds, say)
    content: dict[str, Any] = {
        "cores": cores,
        "load": load,
        "points": [asdict(point) for point in points],
        "collectives": {},
    }
    say(f"\nfitted here, on {cores} cores (gloo over loopback)")
    say(
        f"{'':12}{'latency':>12}{'bandwidth':>14}{'beyond':>10}{'':>12}{'error on held-out points':>26}\n"
        f"{'':12}{'us/message':>12}{'GB/s':>14}{'knee':>10}{'GB/s':>12}{'median':>16}{'largest':>10}"
    )
    for name in COLLECTIVES:
        seen, held = split([point for point in points if point.collective == name], HELD_OUT_PROCESSES, HELD_OUT_SIZES)
        model = fit(seen, cores)
        found = check(model, held)
        say(_fit_line(model, found))
        content["collectives"][name] = model.to_json() | {
            "held_out_points": len(held),
            "median_error": found.median,
            "largest_error": found.largest,
            "passed": found.passed,
        }
        if not found.passed:
            say(f"{'':12}{_why_not(found, cores, load)}")
    steps, own = measure_steps(2, rounds)
    share = hidden_share(steps)
    said = "no communication beyond noise" if share is None else f"{100 * share:.0f} % of communication hidden"
    say(
        f"\noverlap here, 2 processes: {1e3 * steps['alone']:.1f} ms alone, {1e3 * steps['ddp']:.1f} ms with DDP, "
        f"{1e3 * steps['afterwards']:.1f} ms with the all-reduces after backward: {said}"
    )
    slowest = _slowest(own)
    say(
        f"the slower of 2 processes: {1e3 * slowest['predicted']:.1f} ms expected from the spread of single steps "
        f"({1e3 * slowest['mean']:.1f} ms in the mean), {1e3 * slowest['measured']:.1f} ms measured"
    )
    return content | {"overlap": steps | {"hidden_share": share}, "slowest": slowest}


def _slowest(own: Sequence[Sequence[float]]) -> dict[str, float]:
    """Seconds of a rank's mean step, and of the slowest rank's: as measured, and as expected of independent ranks."""
    every = [seconds for rank in own for seconds in rank]
    return {
        "mean": fmean(every),
        "predicted": expected_maximum(every, len(own)),
        "measured": fmean(map(max, zip(*own, strict=True))),
    }


def _fit_line(model: Fitted, found: Check) -> str:
    def bandwidth(per_byte: float) -> str:
        return f"{1e-9 / per_byte:.2f}" if per_byte else "-"

    return (
        f"{model.collective:12}{1e6 * model.latency:12.0f}{bandwidth(model.per_byte):>14}"
        f"{_size(model.knee):>10}{bandwidth(model.per_byte_beyond):>12}"
        f"{100 * found.median:15.1f}%{100 * found.largest:9.0f}%"
    )


def _why_not(found: Check, cores: int, load: float) -> str:
    """Which number of processes the model misses most, and the likely reason."""
    by_ranks: dict[int, list[float]] = {}
    for point, error in found.errors:
        by_ranks.setdefault(point.ranks, []).append(abs(error))
    worst = max(by_ranks, key=lambda ranks: sorted(by_ranks[ranks])[len(by_ranks[ranks]) // 2])
    shared = f", which share {cores} cores" if worst > cores else ""
    reason = "when the system lets a process run is not in the model"
    if load > 1:
        reason = f"other work was running (load {load:.1f}), which is not in the model; measure again when it is not"
    middle = sorted(by_ranks[worst])[len(by_ranks[worst]) // 2]
    return (
        f"over the target of {100 * TARGET:.0f} %, most with {worst} processes{shared} "
        f"({100 * middle:.0f} % in the median): {reason}"
    )


def _size(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
