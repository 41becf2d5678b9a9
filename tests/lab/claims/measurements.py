"""Measurements of every claim, published or made up where these decide too little, and changes of them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from ddp_lab.claims.framework import suite
from ddp_lab.claims.framework.claim import Judgement
from ddp_lab.claims.framework.statistics import ROUNDS

Measurements = dict[str, Any]
Change = Callable[[Measurements], None]
CLAIMS = {known.claim.id: known for known in suite.known_claims()}
PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "results"
NOISE = (0.6, 1.5, 0.8, 1.3, 1.0, 0.7, 1.6, 0.9, 1.2, 0.8, 1.1)
"""Rounds that vary too much to show a difference."""


@cache
def published(number: str) -> dict[str, Any]:
    """The record of a claim."""
    content = suite.read(PUBLISHED / "claims" / f"{number}.json")
    assert content is not None, f"{number} is not published: measure all with ddp claims --full, and copy its file"
    return content


def measurements_of(number: str) -> Measurements:
    """What the claim's tests begin with."""
    if number in MADE_UP:
        return MADE_UP[number]()
    found = deepcopy(published(number)["measurements"])
    if number in ON_CUDA:
        ON_CUDA[number](found)
    return dict(found)


def judged(number: str, *changes: Change) -> Judgement:
    """What the claim's rule says after these changes."""
    measurements = measurements_of(number)
    for change in changes:
        change(measurements)
    found = CLAIMS[number].judge(suite.plain(measurements))
    assert found.reason
    suite.plain(found.to_json())
    return found


def around(value: float, rounds: int = ROUNDS[0], spread: float = 0.01) -> list[float]:
    """The rounds of a measurement, all near `value`."""
    return [value * (1 + spread * ((number * 5) % rounds / rounds - 0.5)) for number in range(rounds)]


def wave(height: float) -> list[float]:
    """Losses that alternate between `height` and -`height`."""
    return [height * (-1) ** step for step in range(40)]


def spread(height: float, workers: int) -> list[float]:
    """A wave of which each height is that of so many gradients."""
    return [loss for loss in wave(height) for _ in range(workers)]


def instead(other: Measurements) -> Change:
    """A change that replaces all measurements."""

    def change(measurements: Measurements) -> None:
        measurements.clear()
        measurements.update(other)

    return change


def at(*path: Any, value: Any) -> Change:
    """A change that puts `value` at `path`, or what a function makes of the value there."""

    def change(measurements: Measurements) -> None:
        place: Any = measurements
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value(place[path[-1]]) if callable(value) else deepcopy(value)

    return change


def times(factor: float, *path: Any, noise: tuple[float, ...] = (1.0,)) -> Change:
    """A change of the rounds at `path` by this factor."""
    return at(
        *path, value=lambda rounds: [value * factor * noise[each % len(noise)] for each, value in enumerate(rounds)]
    )


def among(name: str, values: dict[str, Any], **which: Any) -> Change:
    """A change that gives `values` to those of `measurements[name]` in which all of `which` holds."""

    def change(measurements: Measurements) -> None:
        for each in measurements[name]:
            if which.items() <= each.items():
                each |= values

    return change


def all_of(*changes: Change) -> Change:
    """Several changes, one after another."""

    def change(measurements: Measurements) -> None:
        for each in changes:
            each(measurements)

    return change


def receiving(way: str, seconds: Callable[[int], float]) -> Change:
    """A change of C11: however many receive, this way takes so long."""
    return at("judged", "seconds", way, value=lambda found: {each: around(seconds(int(each)), 18) for each in found})


def ended(factor: int, rule: str, by: float, noise: tuple[float, ...] = (1.0,)) -> Change:
    """A change of the losses with which the runs of C16 ended, by this factor."""

    def change(measurements: Measurements) -> None:
        for case in measurements["cases"]:
            if (case["factor"], case["rule"]) == (factor, rule):
                case["loss"] *= by * noise[case["seed"] % len(noise)]

    return change


def survives(name: str) -> Change:
    """A change of C18: rank 0 goes on."""
    return among(name, {"status": "completed", "exit_code": 0, "last_step": 66})


def limited(way: str, out_of_memory: bool, said: str) -> Change:
    """A training of C22 that failed."""
    failed = {"trained": False, "losses": [], "out_of_memory": out_of_memory, "said": said}
    return at("limited", way, value=failed)


def c07() -> Measurements:
    dp = {"memory": [2e9, 1e9], "busy": [2.0, 1.0]}
    even = {"memory": [1e9, 1e9], "busy": [1.0, 1.0]}
    return {"cuda_devices": 2, "steps": 10, "layouts": {"dp": dp, "ddp": even}}


MADE_UP = {"C07": c07}
ON_CUDA: dict[str, Change] = {
    "C06": all_of(
        at("device", value="cuda"),
        *(
            at("experiments", name, "seconds", value={"dp": around(dp), "ddp": around(1.0)})
            for name, dp in (("digits", 1.3), ("resnet18", 1.1))
        ),
    ),
    "C08": at("cuda", value={"devices": 2, "parameters": 100, "weights": 103.0, "gradients": 100.0}),
    # DP ends farther from a single device than DDP.
    "C19": all_of(at("device", value="cuda"), among("cases", {"dp": 2e-7, "ddp": 1e-7})),
    "C21": all_of(at("device", value="cuda"), at("global_batch_size", value=256)),
}
"""What the published machine, which has no GPU, would measure with two."""
