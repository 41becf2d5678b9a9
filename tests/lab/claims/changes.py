"""Changes of the made-up measurements, and what the rules then say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp_lab.claims.framework import suite
from ddp_lab.claims.framework.claim import Judgement
from tests.lab.claims.measurements import MEASUREMENTS, Measurements, wave

Change = Callable[[Measurements], None]
CONFIRMED, REFUTED, MISSING, OPEN = "confirmed", "refuted", "not measurable here", "inconclusive"
PARTLY = "confirmed in part"


def judge(number: str, measurements: Measurements) -> Judgement:
    (known,) = suite.known_claims([number])
    found = known.judge(suite.plain(measurements))
    assert found.reason
    suite.plain(found.to_json())
    return found


def judged(number: str, change: Change | None = None) -> Judgement:
    measurements = MEASUREMENTS[number]()
    if change is not None:
        change(measurements)
    return judge(number, measurements)


def instead(other: Measurements) -> Change:
    """A change that replaces all measurements."""

    def change(measurements: Measurements) -> None:
        measurements.clear()
        measurements.update(other)

    return change


def at(*path: Any, value: Any) -> Change:
    """A change that puts `value` at `path` in the measurements."""

    def change(measurements: Measurements) -> None:
        place: Any = measurements
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change


def ended(factor: int, scaled: bool, name: str, *values: float) -> Change:
    """A change of what the runs of C16 ended with: one value for each seed, or one for all."""

    def change(measurements: Measurements) -> None:
        for case in measurements["cases"]:
            if (case["factor"], case["scaled"]) == (factor, scaled):
                case[name] = values[case["seed"] % len(values)]

    return change


def fewer_seeds(measurements: Measurements) -> None:
    measurements["cases"] = [case for case in measurements["cases"] if case["seed"] < 7]


def both(*changes: Change) -> Change:
    """Several changes, one after another."""

    def change(measurements: Measurements) -> None:
        for each in changes:
            each(measurements)

    return change


def staleness_8(factor: Callable[[int], float]) -> Change:
    def change(measurements: Measurements) -> None:
        for case in measurements["delayed"]:
            if case["staleness"] == 8:
                case["losses"] = wave(0.1 * factor(case["seed"]))

    return change


def server(way: str, name: str, value: Callable[[int], Any], pause: bool = True) -> Change:
    """A change of what the parameter server of C17 saw, by seed."""

    def change(measurements: Measurements) -> None:
        for run in measurements["server"]:
            if run["way"] == way and bool(run["pause"]) == pause:
                run[name] = value(run["seed"])

    return change


def server_wave(height: Callable[[int], float]) -> Change:
    """A change of the asynchronous server's loss, the same for the three gradients of a step."""
    return server("asynchronous", "losses", lambda seed: [loss for loss in wave(height(seed)) for _ in range(3)])


NO_WAIT = server("synchronous", "wait_seconds", lambda seed: 0.002)
BOTH_WAIT = server("asynchronous", "wait_seconds", lambda seed: 0.02)
CALM_SERVER, CALM_STALE = server_wave(lambda seed: 0.05), staleness_8(lambda seed: 0.5)


def shared_path(way: str, at_return: int, at_end: int) -> Change:
    return at("shared_path", way, value={"rounds": 16, "at_return": at_return, "at_end": at_end})


def c03_mended(measurements: Measurements) -> None:
    for rank in measurements["by_ranks"]["2"]["on"]:
        rank["weights_changed"] = [1.0]


C03_WRONG = [
    at("by_ranks", "2", "on", 1, "weights", value=[2.0]),
    at("by_ranks", "2", "on", 1, "counter_after_construction", value=200.0),
    at("by_ranks", "2", "on", 1, "counters", value=[100.0, 7.0]),
]


def limited(way: str, out_of_memory: bool, said: str) -> Change:
    """A training of C22 that failed."""
    failed = {"trained": False, "losses": [], "out_of_memory": out_of_memory, "said": said}
    return at("limited", way, value=failed)


RISES = at("cases", "ddp", "losses", value=[2.4, 2.4, 5.0, 8.7])
