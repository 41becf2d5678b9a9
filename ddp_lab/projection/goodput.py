"""Goodput under failures: the share of the time in which a run makes steps that it has not made before.

Failures come at random (a Poisson process), each takes one rank, and another rank takes its place at once; what a
failure costs is always the same, and one that comes meanwhile makes it begin anew. Never are all ranks lost at once.

restart: all ranks start again from the newest checkpoint. With M seconds between failures, T of training between two
checkpoints, D for a save and R until the first new step, an interval takes M e^(R/M) (e^((T+D)/M) - 1) seconds (J. T.
Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer Systems
22, 2006, pages 303-312).

live: the others stand still for L seconds, and make no step again. To stand still for L seconds without a failure takes
M (e^(L/M) - 1), after M seconds of training in the mean, so the share is e^(-L/M).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp_core.base.errors import UserError

HOUR = 3600.0
RESTARTED, WENT_ON, JOINED = "worker killed", "worker killed, live", "worker joins, live"
"""The faults of benchmarks.recovery that are read."""


@dataclass(frozen=True)
class FailureCosts:
    """What a failure costs, in seconds; None where it is neither measured nor given."""

    restart: float | None
    """From the failure to the first new step, without the steps that are made again."""
    live: float | None
    """That the others stand still: at the loss, and when the new rank joins."""
    checkpoint_every: float
    """Training between two checkpoints."""
    save: float
    """For a checkpoint."""


def goodput_of_restart(per_hour: float, costs: FailureCosts) -> float | None:
    """The share of new steps where all start again; None where the cost is not known."""
    if costs.restart is None:
        return None
    every, save = costs.checkpoint_every, costs.save
    if not per_hour:
        return every / (every + save)
    between = HOUR / per_hour
    exponent = (every + save) / between
    if exponent + costs.restart / between > math.log(1e12):
        return 0.0
    return every / (between * math.exp(costs.restart / between) * math.expm1(exponent))


def goodput_of_live(per_hour: float, costs: FailureCosts) -> float | None:
    """The share of new steps where the others go on; None where the cost is not known."""
    if costs.live is None:
        return None
    saving = costs.checkpoint_every / (costs.checkpoint_every + costs.save)
    return saving * math.exp(-costs.live * per_hour / HOUR)


def measured_costs(file: Path) -> tuple[float | None, float | None]:
    """What benchmarks.recovery has recorded: the cost of a restart, and of a loss and a join with live recovery.

    Raises UserError (2) where the file is none of its records.
    """
    try:
        faults = json.loads(file.read_text())["results"]["faults"]
        median = {name: float(faults[name]["median"]) for name in (RESTARTED, WENT_ON, JOINED) if name in faults}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is no record of benchmarks.recovery: {error}") from None
    live = median[WENT_ON] + median[JOINED] if median.keys() >= {WENT_ON, JOINED} else None
    return median.get(RESTARTED), live


def goodput(costs: FailureCosts, rates: Sequence[float]) -> dict[str, Any]:
    """Both shares for each number of failures per hour, as plain values."""
    rows = [
        {"per_hour": rate, "restart": goodput_of_restart(rate, costs), "live": goodput_of_live(rate, costs)}
        for rate in rates
    ]
    return {"costs": asdict(costs), "rows": rows}


def goodput_lines(found: dict[str, Any]) -> list[str]:
    """The table, with what it assumes."""
    costs = found["costs"]

    def seconds(name: str) -> str:
        value = costs[name]
        return f"{value:.2f} s" if value is not None else "(not measured: python -m benchmarks.recovery)"

    lines = [
        "",
        "goodput: the share of the time in which steps are made that were not made before",
        "assumed: failures at random, each takes one rank, another takes its place at once, and never all are lost; a "
        f"checkpoint every {costs['checkpoint_every']:g} s takes {costs['save']:g} s",
        f"restart: {seconds('restart')} from the failure to the first new step, and steps since the checkpoint again",
        f"live: the others stand still for {seconds('live')}, at the loss and when the new rank joins",
        f"{'failures per hour':>17}  {'restart':>8}  {'live':>8}",
    ]
    for row in found["rows"]:
        cells = (f"{100 * row[way]:.2f} %" if row[way] is not None else "-" for way in ("restart", "live"))
        lines.append(f"{row['per_hour']:17g}  " + "  ".join(f"{cell:>8}" for cell in cells))
    return lines
