"""What collectives and steps cost on this machine: measured, fitted, and checked on points held out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from ddp_core.base.fingerprint import cpu_model
from ddp_lab.claims.framework.setting import usable_cores
from ddp_lab.projection.counting import count, count_lines
from ddp_lab.projection.fit import TARGET, Fitted, Point, check, fit, split
from ddp_lab.projection.measure import COLLECTIVES, hidden_share, measure_collectives, measure_steps
from ddp_lab.projection.spread import expected_maximum

KIB, MIB = 1024, 1024 * 1024
SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB)
HELD_OUT_SIZES = (16 * KIB, 512 * KIB, 2 * MIB, 8 * MIB)
FITTED_PROCESSES, HELD_OUT_PROCESSES = (2, 3, 4), (6, 8)
COUNTED = (2, 3, 4, 6, 8)


def rule() -> str:
    """What the fit may see and what it is judged on, fixed before anything is measured."""
    sizes = ", ".join(_size(size) for size in SIZES if size not in HELD_OUT_SIZES)
    held = ", ".join(_size(size) for size in HELD_OUT_SIZES)
    return (
        f"rule, fixed before measuring: fitted on 2, 3 and 4 processes, sizes {sizes};\n"
        f"held out, larger than anything fitted: 6 and 8 processes, all sizes; held out in between: {held};\n"
        f"the fastest round counts; the target is an error of {100 * TARGET:.0f} % in the median"
    )


def measure_here(rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure and fit on this machine; prints the results with `say` and returns them."""
    say(rule())
    cores, load = usable_cores(), os.getloadavg()[0]
    points = measure_collectives((*FITTED_PROCESSES, *HELD_OUT_PROCESSES), SIZES, rounds, say)
    content: dict[str, Any] = {
        "rule": rule(),
        "cores": cores,
        "cpu": cpu_model(),
        "load": load,
        "points": [asdict(point) for point in points],
        "collectives": {},
    }
    say(f"\nfitted here, on {cores} cores (gloo over loopback); errors on what the fit has not seen: median (largest)")
    groups = ["2-4, sizes between", *(f"{ranks} processes" for ranks in HELD_OUT_PROCESSES)]
    say(
        f"{'':12}{'latency':>12}{'bandwidth':>11}{'beyond':>8}{'':>7}"
        + "".join(f"{group:>20}" for group in groups)
        + "\n"
        f"{'':12}{'us/message':>12}{'GB/s':>11}{'knee':>8}{'GB/s':>7}"
    )
    for name in COLLECTIVES:
        seen, held = split([point for point in points if point.collective == name], HELD_OUT_PROCESSES, HELD_OUT_SIZES)
        model = fit(seen, cores)
        content["collectives"][name] = model.to_json() | _judged(model, held)
        say(_fit_line(model, content["collectives"][name]))
    say(_over_the_target(content))
    content["counted"] = count(COUNTED)
    say("\n".join(count_lines(content["counted"])))
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


def _judged(model: Fitted, held: Sequence[Point]) -> dict[str, Any]:
    """The errors on all held-out points together, and for each number of processes; key 0 has the sizes in between."""
    groups: dict[int, list[Point]] = {}
    for point in held:
        groups.setdefault(point.ranks if point.ranks in HELD_OUT_PROCESSES else 0, []).append(point)
    found = check(model, held)
    return {
        "held_out_points": len(held),
        "median_error": found.median,
        "largest_error": found.largest,
        "passed": found.passed,
        "errors": {
            str(ranks): {
                "median": check(model, points).median,
                "largest": check(model, points).largest,
                "by_size": {str(point.size): error for point, error in check(model, points).errors} if ranks else None,
            }
            for ranks, points in sorted(groups.items())
        },
    }


def _fit_line(model: Fitted, judged: dict[str, Any]) -> str:
    def bandwidth(per_byte: float) -> str:
        return f"{1e-9 / per_byte:.2f}" if per_byte else "-"

    errors = [f"{100 * one['median']:.0f} % ({100 * one['largest']:.0f} %)" for one in judged["errors"].values()]
    return (
        f"{model.collective:12}{1e6 * model.latency:12.0f}{bandwidth(model.per_byte):>11}"
        f"{_size(model.knee):>8}{bandwidth(model.per_byte_beyond):>7}" + "".join(f"{error:>20}" for error in errors)
    )


def _over_the_target(content: dict[str, Any]) -> str:
    """Which predictions miss the target, and the likely reason."""
    missed = [
        f"{name} with {ranks} processes" if ranks != "0" else f"{name} between the fitted sizes"
        for name, judged in content["collectives"].items()
        for ranks, found in judged["errors"].items()
        if found["median"] > TARGET
    ]
    if not missed:
        return f"all within the target of {100 * TARGET:.0f} % in the median"
    reason = f"{content['cores']} cores are shared, and when the system lets a process run is not in the model"
    if content["load"] > 1:
        reason = f"other work was running (load {content['load']:.1f}), which is not in the model; measure again"
    return f"over the target of {100 * TARGET:.0f} %: {', '.join(missed)}: {reason}"


def _size(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
