"""What a training loses because no two ranks take the same time for a step: all wait for the slowest.

The slowest of W ranks takes no longer than t where all W do: with probability F(t)^W, if F(t) is the probability that
one rank does, and if ranks are slow independently of each other. The expected value of that maximum grows with W though
every rank stays as it is (H. A. David, H. N. Nagaraja, Order Statistics, 3rd edition, 2003, section 2.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import NormalDist, fmean

from ddp_core.base.errors import UserError
from ddp_core.observe.metrics import read_metrics
from ddp_core.record.directory import RunDirectory

Lateness = Callable[[int], float]
"""For a number of ranks: how much longer than the mean step the slowest rank's step takes, as a share of the mean."""

FEWEST = 20
"""So many steps at least, or their largest says too little."""

_POINTS = 2000


def expected_maximum(seconds: Sequence[float], ranks: int) -> float:
    """The mean of the slowest of `ranks` steps, each drawn from those measured. Raises ValueError for none.

    The i-th smallest of n is the maximum with probability (i/n)^ranks - ((i-1)/n)^ranks. No result is larger than the
    slowest step measured: for many more ranks than steps it is a lower bound.
    """
    if not seconds:
        raise ValueError("no steps to draw from")
    count = len(seconds)
    return sum(
        value * ((place / count) ** ranks - ((place - 1) / count) ** ranks)
        for place, value in enumerate(sorted(seconds), 1)
    )


def measured(seconds: Sequence[float]) -> Lateness:
    """Lateness where steps scatter as these did."""
    mean = fmean(seconds)
    return lambda ranks: expected_maximum(seconds, ranks) / mean - 1


def normal(deviation: float) -> Lateness:
    """Lateness where steps are normally distributed with this relative standard deviation."""

    def lateness(ranks: int) -> float:
        if not deviation:
            return 0.0
        # The mean of the maximum's quantiles: F^-1(v^(1/ranks)) for v evenly over (0, 1).
        quantile = NormalDist().inv_cdf
        return deviation * fmean(quantile(((place + 0.5) / _POINTS) ** (1 / ranks)) for place in range(_POINTS))

    return lateness


def steps_of(run: Path) -> list[float]:
    """Seconds of each step of a run on one rank, trained with `--log-every 1`. Raises UserError (2) where it has none.

    The run's first step is left out: it contains what is done once.
    """
    record = RunDirectory(run).read()
    layout, samples = record["layout"], record["experiment"]["global_batch_size"]
    ranks = layout["nnodes"] * layout["nproc_per_node"]
    if ranks > 1:
        raise UserError(f"{run} has {ranks} ranks, which wait for each other: give a run on one rank (--layout single)")
    records = read_metrics(run / "metrics.jsonl", "step")
    found = [
        samples / step["samples_per_second"]
        for before, step, after in zip(records, records[1:], records[2:], strict=False)
        # The last step of an epoch may have fewer samples.
        if step["step"] == before["step"] + 1 and after["epoch"] == step["epoch"] and step["samples_per_second"]
    ]
    if len(found) < FEWEST:
        raise UserError(
            f"{run} has the times of {len(found)} single steps, and {FEWEST} are needed: train with --log-every 1"
        )
    return found
