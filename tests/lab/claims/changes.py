"""Changes of the made-up measurements, and what the rules then say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp_lab.claims.framework import suite
from ddp_lab.claims.framework.claim import Judgement
from tests.lab.claims.measurements import MEASUREMENTS, Measurements, spread

Change = Callable[[Measurements], None]


def judged(number: str, change: Change | None = None) -> Judgement:
    measurements = MEASUREMENTS[number]()
    if change is not None:
        change(measurements)
    (known,) = suite.known_claims([number])
    found = known.judge(suite.plain(measurements))
    assert found.reason
    suite.plain(found.to_json())
    return found


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


def ended(factor: int, rule: str, *values: float) -> Change:
    """A change of the losses with which the runs of C16 ended: one value for each seed, or one for all."""

    def change(measurements: Measurements) -> None:
        for case in measurements["cases"]:
            if (case["factor"], case["rule"]) == (factor, rule):
                case["loss"] = values[case["seed"] % len(values)]

    return change


def fewer_seeds(measurements: Measurements) -> None:
    measurements["cases"] = [case for case in measurements["cases"] if case["seed"] < 10]


def both(*changes: Change) -> Change:
    """Several changes, one after another."""

    def change(measurements: Measurements) -> None:
        for each in changes:
            each(measurements)

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
    return server("asynchronous", "losses", lambda seed: spread(height(seed), 3))


NO_WAIT = server("synchronous", "wait_seconds", lambda seed: 0.002)
BOTH_WAIT = server("asynchronous", "wait_seconds", lambda seed: 0.02)
CALM_SERVER = server_wave(lambda seed: 0.05)


def calm_more(measurements: Measurements) -> None:
    """Asynchronous updates of more workers whose loss varies less than that of synchronous ones."""
    for run in measurements["more"]:
        if run["way"] == "asynchronous":
            run["losses"] = spread(0.05, 8)


def wild_synchronous(measurements: Measurements) -> None:
    """One process whose loss varies less than the synchronous server's."""
    for run in measurements["alone"]:
        run["losses"] = spread(0.02, 3)


def shared_path(way: str, at_return: int, at_end: int) -> Change:
    return at("shared_path", way, value={"rounds": 16, "at_return": at_return, "at_end": at_end})


def c03_mended(measurements: Measurements) -> None:
    for rank in measurements["by_ranks"]["2"]["on"]:
        rank["weights_changed"] = [1.0]


def loop(value: list[float]) -> Change:
    """A change of C11: however many receive, the send loop takes this."""

    def change(measurements: Measurements) -> None:
        by_count: dict[str, Any] = measurements["judged"]["seconds"]["send loop"]
        by_count.update(dict.fromkeys(by_count, value))

    return change


def survives(name: str) -> Change:
    """A change of C18: rank 0 goes on."""

    def change(measurements: Measurements) -> None:
        for run in measurements[name]:
            run |= {"status": "completed", "exit_code": 0, "last_step": 66}

    return change


def fewer_rounds(measurements: Measurements) -> None:
    for values in measurements["judged"]["seconds"].values():
        del values[10:]


def limited(way: str, out_of_memory: bool, said: str) -> Change:
    """A training of C22 that failed."""
    failed = {"trained": False, "losses": [], "out_of_memory": out_of_memory, "said": said}
    return at("limited", way, value=failed)
