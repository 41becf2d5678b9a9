"""The rules of C12 to C22 on made-up measurements: each verdict that a rule can give, and that a rule can fail."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from ddp_lab.claims.c17_asynchronous import DIVERGED, jitter
from ddp_lab.claims.framework import suite

Measurements = dict[str, Any]
Change = Callable[[Measurements], None]
CONFIRMED, REFUTED, MISSING, OPEN = "confirmed", "refuted", "not measurable here", "inconclusive"


def c12() -> Measurements:
    right = {"loss": "mean", "rescaled": True, "difference": 2e-7, "factor": 1.0}
    return {
        "square": [8.0, 16.0],
        "micro_batches": 4,
        "ranks": 2,
        "cases": [
            {"where": "one process"} | right,
            {"where": "DDP", "no_sync": True} | right,
            {"where": "one process", "loss": "mean", "rescaled": False, "difference": 3.0, "factor": 4.0},
            {"where": "BatchNorm", "loss": "sum", "rescaled": True, "difference": 0.03, "factor": 1.0},
        ],
    }


def c13() -> Measurements:
    losses = {
        "64": {"rank0": 2.0, "all_ranks": 2.0, "padded": 2.0},
        "5": {"rank0": 2.0, "all_ranks": 2.0, "padded": 2.1},
    }
    seconds = {"rank0": [1.0] * 7, "all_ranks": [0.5, 0.52, 0.51, 0.55, 0.5, 0.53, 0.49]}
    return {"devices": 2, "cases": [{"ranks": 2, "losses": losses, "samples": 64, "seconds": seconds}]}


def c14() -> Measurements:
    case = {"layout": "single", "killed_after": [7, 30], "resumed_at": [5, 30], "exit_code": 0, "weights_sha256": "a"}
    shared = {"rounds": 8, "unreadable": 1, "mixed": 1}
    return {"undisturbed": "a", "checkpoint_every": 5, "cases": [case, case | {"layout": "ddp"}], "shared_path": shared}


def c15() -> Measurements:
    case = {"launcher": "torchrun", "ranks": 2, "exit_code": 0, "weights_sha256": "abc", "said": ""}
    return {"cases": [case, case | {"launcher": "spawn"}]}


def c16() -> Measurements:
    accuracy = {(1, True): 98.0, (2, True): 97.8, (2, False): 97.0, (8, True): 97.5, (8, False): 90.0}
    return {
        "epochs": 6,
        "batch": 32,
        "rate": 0.02,
        "cases": [
            {"factor": factor, "scaled": scaled, "seed": seed, "test_accuracy": value, "test_loss": 0.1}
            for (factor, scaled), value in accuracy.items()
            for seed in range(3)
        ],
    }


def wave(height: float) -> list[float]:
    return [height * (-1) ** step for step in range(40)]


def c17() -> Measurements:
    delayed = [
        {"staleness": staleness, "seed": seed, "losses": wave(0.1 * (1 + staleness) * (1 + 0.01 * seed))}
        for seed in range(6)
        for staleness in (0, 8)
    ]
    run = {"losses": wave(0.1), "staleness": 0.0, "gradients_per_second": 100.0}
    server = [
        run | {"way": way, "wait_percent": wait}
        for way, waits in (("synchronous", (50.0, 60.0)), ("asynchronous", (5.0, 10.0)))
        for wait in waits
    ]
    return {"delayed": delayed, "server": server, "workers": 3}


def c18() -> Measurements:
    alone = {"exit_code": 6, "status": "failed", "weights_sha256": None, "killed": True, "last_step": 29}
    again = {"exit_code": 0, "status": "completed", "weights_sha256": "a", "killed": True, "last_step": 66}
    return {
        "undisturbed": "a",
        "steps": 66,
        "without_restart": alone | {"seconds_lost": None, "steps_lost": None},
        "with_restart": [again | {"seconds_lost": 4.0, "steps_lost": 9}],
    }


def c19() -> Measurements:
    def runs(*digests: str) -> list[dict[str, Any]]:
        return [
            {"layout": layout, "count": count, "weights_sha256": digest}
            | {"difference_parameters": 1e-7, "difference_buffers": 0.1}
            for (layout, count), digest in zip((("single", 1), ("dp", 2), ("ddp", 2)), digests, strict=True)
        ]

    return {"device": "cpu", "runs": {"plain": runs("a", "b", "c"), "exact": runs("d", "d", "d")}}


def c20() -> Measurements:
    return {"cores": 2, "device": "cpu", "wait_percent": {"0": [50.0, 51, 52, 49, 50], "1": [10.0, 11, 9, 10, 12]}}


def c21() -> Measurements:
    case = {"completed": True, "losses": [2.5, 2.4], "images_per_second": 4.0, "peak_memory_bytes": 2**30}
    return {
        **{"device": "cpu", "global_batch_size": 4, "image_size": 224, "count": 2},
        "cases": {"dp": dict(case), "ddp": dict(case)},
    }


def c22() -> Measurements:
    return {"device": "cpu", "cases": [{"name": "a", "estimate": 110, "peak": 100, "parts": {}}]}


GOOD = {number: function for number, function in globals().items() if number[:1] == "c" and number[1:].isdigit()}


def at(*path: Any, value: Any) -> Change:
    """Put a value somewhere into the measurements."""

    def change(measurements: Measurements) -> None:
        place: Any = measurements
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change


def accuracies(factor: int, scaled: bool, value: float) -> Change:
    def change(measurements: Measurements) -> None:
        for case in measurements["cases"]:
            if (case["factor"], case["scaled"]) == (factor, scaled):
                case["test_accuracy"] = value

    return change


def losses(factor: int, scaled: bool, value: float | None) -> Change:
    def change(measurements: Measurements) -> None:
        for case in measurements["cases"]:
            if (case["factor"], case["scaled"]) == (factor, scaled):
                case["test_loss"] = value

    return change


def staleness_8(factor: Callable[[int], float]) -> Change:
    def change(measurements: Measurements) -> None:
        for case in measurements["delayed"]:
            if case["staleness"] == 8:
                case["losses"] = wave(0.1 * factor(case["seed"]))

    return change


def waits(way: str, *values: float) -> Change:
    def change(measurements: Measurements) -> None:
        runs = [run for run in measurements["server"] if run["way"] == way]
        for run, value in zip(runs, values, strict=True):
            run["wait_percent"] = value

    return change


TURNS: list[tuple[str, str, Change | None, str]] = [
    (number, "good", None, {"c18": REFUTED}.get(number, CONFIRMED)) for number in GOOD
]
TURNS += [
    ("c12", "gradients replaced", at("square", value=[8.0, 8.0]), REFUTED),
    ("c12", "DDP differs", at("cases", 1, "difference", value=2e-6), REFUTED),
    ("c12", "an unscaled mean is right", at("cases", 2, "factor", value=1.0), REFUTED),
    ("c13", "another loss", at("cases", 0, "losses", "5", "all_ranks", value=2.00001), REFUTED),
    ("c13", "slower", at("cases", 0, "seconds", "all_ranks", value=[1.5, 1.6, 1.5, 1.4, 1.5, 1.6, 1.5]), REFUTED),
    ("c13", "noise", at("cases", 0, "seconds", "all_ranks", value=[0.8, 1.3, 0.9, 1.1, 1.0, 1.2, 0.7]), OPEN),
    ("c13", "one core", at("devices", value=1), MISSING),
    ("c14", "other weights", at("cases", 1, "weights_sha256", value="b"), REFUTED),
    ("c14", "not resumed", at("cases", 0, "weights_sha256", value=None), REFUTED),
    ("c15", "other digest", at("cases", 1, "weights_sha256", value="def"), REFUTED),
    ("c15", "does not start", at("cases", 0, "exit_code", value=1), REFUTED),
    ("c15", "never ends", at("cases", 0, "exit_code", value=None), REFUTED),
    ("c16", "lost at 2", accuracies(2, True, 96.0), REFUTED),
    ("c16", "scaling is worse", losses(8, True, 0.9), REFUTED),
    ("c16", "scaling diverges", losses(8, True, None), REFUTED),
    ("c16", "kept up to 2", accuracies(8, True, 95.0), OPEN),
    ("c17", "no more jitter", staleness_8(lambda seed: 0.5 * (1 + 0.01 * seed)), REFUTED),
    ("c17", "noise", staleness_8(lambda seed: 0.5 + 0.3 * seed), OPEN),
    ("c17", "synchronous does not wait", waits("synchronous", 1.0, 2.0), REFUTED),
    ("c17", "waiting overlaps", waits("synchronous", 7.0, 60.0), OPEN),
    ("c17", "diverged", at("delayed", 1, "losses", value=[1.0, DIVERGED]), CONFIRMED),
    ("c18", "survives", at("without_restart", "status", value="completed"), REFUTED),
    ("c18", "not killed", at("without_restart", "killed", value=False), OPEN),
    ("c18", "not recovered", at("with_restart", 0, "status", value="failed"), REFUTED),
    ("c19", "same bits in plain", at("runs", "plain", value=c19()["runs"]["exact"]), REFUTED),
    ("c19", "exact differs", at("runs", "exact", value=c19()["runs"]["plain"]), OPEN),
    ("c20", "workers make it worse", at("wait_percent", "1", value=[80.0, 81, 82, 80, 79]), REFUTED),
    ("c20", "overlap", at("wait_percent", "1", value=[40.0, 55, 45, 60, 48]), OPEN),
    ("c20", "one core", at("cores", value=1), MISSING),
    ("c21", "dp fails", at("cases", "dp", value={"completed": False, "said": "out of memory"}), REFUTED),
    ("c21", "not finite", at("cases", "ddp", "losses", value=[2.5, None]), REFUTED),
    ("c22", "too small", at("cases", 0, "peak", value=140), REFUTED),
    ("c22", "too large", at("cases", 0, "peak", value=80), REFUTED),
    ("c22", "nothing tells", at("cases", value=[]), MISSING),
]


def judged(number: str, change: Change | None = None) -> Any:
    measurements = copy.deepcopy(GOOD[number]())
    if change is not None:
        change(measurements)
    (known,) = suite.known_claims([number])
    found = known.judge(suite.plain(measurements))
    assert found.reason
    suite.plain(found.to_json())
    return found


@pytest.mark.parametrize(
    ("number", "change", "verdict"),
    [(number, change, verdict) for number, _, change, verdict in TURNS],
    ids=[f"{number} {name}" for number, name, _, _ in TURNS],
)
def test_verdict(number: str, change: Change | None, verdict: str) -> None:
    assert judged(number, change).verdict == verdict


def test_c18_is_confirmed_only_by_a_run_that_goes_on_alone() -> None:
    def survives(measurements: Measurements) -> None:
        measurements["without_restart"] |= {"status": "completed", "exit_code": 0}

    assert judged("c18", survives).verdict == CONFIRMED
    assert "did not save" in judged("c18", at("with_restart", 0, "status", value="failed")).reason


def test_c21_names_the_smaller_batch() -> None:
    assert "batch 4 instead of 256" in judged("c21").reason
    assert "instead" not in judged("c21", at("global_batch_size", value=256)).reason


def test_c20_says_how_many_cores_there_are() -> None:
    assert "2 cores" in judged("c20", at("wait_percent", "4", value=[12.0, 13, 12, 14, 12])).reason


def test_jitter_leaves_a_trend_out_and_knows_divergence() -> None:
    falling = [1 - step / 100 for step in range(100)]
    assert jitter(falling) < 1e-12
    assert jitter([*falling[:50], *wave(0.1)]) > 0.009
    assert jitter([1.0, DIVERGED]) == DIVERGED


def test_every_number_of_the_list_has_a_file() -> None:
    assert len(suite.known_claims([f"C{number}" for number in range(12, 23)])) == 11
