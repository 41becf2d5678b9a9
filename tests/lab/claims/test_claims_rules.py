"""The rules of the claims: which part of a claim another measurement turns, and how."""

from __future__ import annotations

import pytest

from ddp_lab.claims.c17_asynchronous import jitter
from ddp_lab.claims.framework.claim import Judgement
from ddp_lab.claims.measuring.parameter_server import DIVERGED
from tests.lab.claims.measurements import (
    CLAIMS,
    NOISE,
    Change,
    all_of,
    among,
    at,
    ended,
    instead,
    judged,
    limited,
    measurements_of,
    published,
    receiving,
    spread,
    survives,
    times,
    wave,
)

CONFIRMED, REFUTED, MISSING, OPEN = "confirmed", "refuted", "not measurable here", "inconclusive"
PARTLY = "confirmed in part"

UNCHANGED = {
    **{
        "C02": {0: REFUTED, 2: REFUTED, 4: REFUTED, 5: REFUTED},
        "C16": {0: OPEN, 1: OPEN, 2: REFUTED},
        "C17": {2: OPEN, 3: OPEN},
    },
    **{"C03": {3: REFUTED}, "C04": {1: REFUTED}, "C09": {1: REFUTED}, "C10": {1: REFUTED}, "C11": {3: REFUTED}},
    **{
        "C12": {2: REFUTED},
        "C13": {1: REFUTED},
        "C14": {4: PARTLY},
        "C15": {1: REFUTED},
        "C18": {0: REFUTED, 1: REFUTED},
        "C22": {4: REFUTED},
    },
}
"""What is not confirmed before a change, by the part's place: also where the record is older than the rule."""

WEAK, APART = (("points", 1, "seconds", way) for way in ("weak 2", "apart 2"))
SPAWNED = (6, 13)
"""The cases of C15 that mp.spawn started, on 2 ranks and on 4."""
AFTER, RESNET, BUCKETS = ("judged", "seconds", "after"), ("experiments", "resnet18", "seconds"), ("networks", "narrow")
ON = ("by_ranks", "2", "on", 1)
SHAPED = measurements_of("C11")["judged"]["seconds"]
# The send loop takes 0.21 seconds for each further receiver.
BENT = receiving("send loop", lambda count: 0.2 + 0.05 * (count - 1) ** 2)
IN_BETWEEN = receiving("dist.broadcast", lambda count: 0.75 * 0.2085 * (count - 1))
EVALUATED = ("cases", 0, "seconds")
SPED = ("samples_per_second", "2")


def shared_path(way: str, at_return: int, at_end: int) -> Change:
    return at("shared_path", way, value={"rounds": 16, "at_return": at_return, "at_end": at_end})


def weighed_right(losses: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The losses of C13 where the source's own way is that of one rank."""
    return {length: found | {"own_all_ranks": found["own_rank0"]} for length, found in losses.items()}


TURNS: list[tuple[str, Change, dict[int, str]]] = [
    ("C01", at("runs", 1, "w", value=2.03), {0: REFUTED}),
    ("C01", at("runs", 1, "loss", value=0.012), {0: REFUTED}),
    ("C02", times(1.3, *WEAK), {1: REFUTED}),
    ("C02", times(0.8, *WEAK), {1: OPEN}),
    ("C02", times(0.83, "points", 0, "seconds", "weak 2"), {0: CONFIRMED}),
    ("C02", all_of(times(1.4, *WEAK), times(1.4, *APART)), {1: MISSING}),
    ("C02", times(0.13, "toy", "seconds", "strong 2"), {5: OPEN}),
    (
        "C03",
        all_of(*(at("by_ranks", count, "on", value=lambda ranks: [ranks[0]] * 4) for count in "24")),
        {3: CONFIRMED},
    ),
    ("C03", at(*ON, "weights", value=[2.0]), {0: REFUTED}),
    ("C03", at(*ON, "counter_after_construction", value=200.0), {1: REFUTED}),
    ("C03", at(*ON, "counters", value=[100.0, 7.0]), {2: REFUTED}),
    ("C04", times(0.7, *AFTER), {0: REFUTED}),
    ("C04", at("judged", "seconds", value=lambda found: {way: found[way][:10] for way in found}), {0: OPEN}),
    ("C04", at("judged", value=None), {0: MISSING}),
    ("C04", times(5.0, "unshaped", "seconds", "alone"), {0: MISSING}),
    ("C04", at("unshaped", value=None), {}),
    ("C04", at("devices", value=1), {0: MISSING}),
    ("C04", at("changes", 0, "changed during backward", value=1), {1: CONFIRMED}),
    ("C04", at("changes", 0, "changed after step", value=0), {1: OPEN}),
    ("C05", at("found_default", value=1.0), {0: REFUTED}),
    ("C05", times(0.1, *BUCKETS, "seconds", "one by one"), {1: REFUTED}),
    ("C05", at("networks", value={}), {1: MISSING, 2: MISSING}),
    ("C06", times(0.8, *RESNET, "dp"), {0: REFUTED}),
    ("C06", at("experiments", value=published("C06")["measurements"]["experiments"]), {0: MISSING}),
    ("C07", at("layouts", "dp", value={"memory": [1e9, 2e9], "busy": [1.0, 2.0]}), {0: REFUTED}),
    ("C07", at("layouts", "dp", "busy", value=[1.0, 1.0]), {0: OPEN}),
    ("C08", at("by_devices", "4", "ddp", 0, "sent", value=1e6), {0: REFUTED}),
    ("C08", all_of(at("countable", value=False), at("by_devices", value={})), {0: MISSING}),
    ("C08", at("cuda", "weights", value=0.0), {1: REFUTED}),
    ("C08", at("cuda", value=None), {1: MISSING}),
    ("C09", at("ids", value=lambda ids: ids | {"without": ids["with"]}), {0: REFUTED}),
    ("C09", at("ids", value=lambda ids: ids | {"with": ids["without"]}), {0: REFUTED}),
    ("C09", at("samples", value=1001), {1: CONFIRMED}),
    ("C10", among("cases", {"repeated": 0}), {1: CONFIRMED}),
    ("C10", among("cases", {"repeated": 1}), {0: REFUTED}),
    ("C11", BENT, {0: REFUTED, 3: CONFIRMED}),
    ("C11", at("judged", "seconds", "dist.broadcast", value=SHAPED["tree"]), {3: CONFIRMED}),
    ("C11", IN_BETWEEN, {3: OPEN}),
    ("C11", at("unshaped", "seconds", value=SHAPED), {0: MISSING, 1: MISSING, 2: MISSING, 3: MISSING}),
    ("C11", at("unshaped", value=None), {}),
    ("C12", at("square", value=[8.0, 8.0]), {0: REFUTED}),
    ("C12", among("cases", {"difference": 2e-6}, where="DDP"), {1: REFUTED}),
    ("C12", among("cases", {"factor": 1.0}, rescaled=False), {1: REFUTED}),
    ("C12", among("cases", {"difference": 3e-7}, where="BatchNorm"), {2: CONFIRMED}),
    ("C13", at("devices", value=1), {3: MISSING, 4: MISSING}),
    ("C13", at("cases", 0, "losses", "5", "all_ranks", value=lambda loss: 1.000005 * loss), {2: REFUTED}),
    ("C13", at("cases", 0, "losses", value=weighed_right), {1: CONFIRMED}),
    ("C13", times(3.0, *EVALUATED, "all_ranks"), {4: REFUTED}),
    ("C13", times(3.0, *EVALUATED, "own_all_ranks"), {3: REFUTED}),
    ("C14", at("torch_alone", 0, "resumed_at", value=0), {0: REFUTED}),
    ("C14", at("torch_alone", 0, "resumed_loss", value=190.0), {0: REFUTED}),
    ("C14", at("torch_alone", 0, "killed", value=False), {0: OPEN}),
    ("C14", at("cases", 0, "resumed_at", value=[5, 25]), {1: REFUTED}),
    ("C14", at("cases", 0, "weights_sha256", value=None), {1: REFUTED}),
    ("C14", at("written", "opened", "1", value=["a"]), {2: REFUTED}),
    ("C14", at("written", "opened", value={"0": ["fence.lock"]}), {2: OPEN}),
    ("C14", at("written", "files", value=["by another hand"]), {2: OPEN}),
    ("C14", shared_path("different", 0, 0), {3: REFUTED}),
    ("C14", shared_path("equal", 0, 0), {4: REFUTED}),
    ("C14", shared_path("different", 3, 0), {3: PARTLY}),
    ("C14", shared_path("alone", 1, 0), {3: OPEN, 4: OPEN}),
    ("C15", at("cases", 1, "weights_sha256", value="def"), {0: REFUTED}),
    ("C15", all_of(*(at("cases", number, "weights_sha256", value=None) for number in SPAWNED)), {0: REFUTED}),
    (
        "C15",
        all_of(
            *(at("cases", number, "weights_sha256", value="abc") for number in range(14)),
            *(at("cases", number, "exit_code", value=0) for number in range(14)),
        ),
        {1: CONFIRMED},
    ),
    ("C16", ended(2, "linear", 1.4), {0: REFUTED}),
    ("C16", ended(2, "square root", 0.8), {0: REFUTED}),
    ("C16", ended(2, "twice linear", 0.6), {0: REFUTED}),
    ("C16", ended(2, "square root", 1.4), {0: CONFIRMED}),
    ("C16", all_of(ended(2, "square root", 1.4), ended(2, "none", 0.8, NOISE)), {}),
    ("C16", ended(4, "linear", 0.6), {1: CONFIRMED}),
    ("C16", at("edge", value=True), {2: OPEN}),
    ("C16", at("cases", value=lambda cases: [case for case in cases if case["seed"] < 10]), {2: OPEN}),
    ("C17", among("server", {"wait_seconds": 0.002}, way="synchronous", pause=0.02), {0: REFUTED}),
    ("C17", among("server", {"wait_seconds": 0.02}, way="asynchronous", pause=0.02), {1: REFUTED}),
    ("C17", among("server", {"losses": spread(0.001, 3)}, way="asynchronous"), {2: REFUTED}),
    ("C17", among("server", {"losses": spread(0.5, 3)}, way="asynchronous"), {2: CONFIRMED}),
    ("C17", among("more", {"losses": spread(0.001, 8)}, way="asynchronous"), {3: REFUTED}),
    ("C17", among("more", {"losses": spread(0.5, 8)}, way="asynchronous"), {3: CONFIRMED}),
    ("C17", among("alone", {"losses": spread(0.02, 3)}), {4: REFUTED}),
    ("C18", all_of(survives("alone"), survives("without_restart")), {0: CONFIRMED, 1: CONFIRMED}),
    ("C18", all_of(*(at(name, 1, "killed", value=False) for name in ("alone", "without_restart"))), {0: OPEN, 1: OPEN}),
    ("C18", among("with_restart", {"status": "failed"}), {}),
    ("C19", at("device", value="cpu"), {2: MISSING, 3: MISSING}),
    ("C19", at("cases", 3, "digests", value=["a", "b"]), {0: REFUTED}),
    ("C19", among("cases", {"ddp": 0.0}), {1: REFUTED}),
    ("C19", among("cases", {"dp": 0.0}), {2: REFUTED, 3: REFUTED}),
    ("C19", among("cases", {"dp": 1e-8}), {3: REFUTED}),
    ("C19", among("cases", {"dp": 1e-7}), {3: OPEN}),
    ("C19", at("cases", 1, "the exact reduction", value=1e-8), {4: REFUTED}),
    ("C19", among("cases", {"torch's DDP": 0.0}), {4: OPEN}),
    ("C20", at("cores", value=1), {1: MISSING}),
    ("C20", at("alone", "main_process_fetched", value=True), {0: REFUTED}),
    ("C20", at("alone", "batches_ready", value=0.0), {0: REFUTED}),
    ("C20", at("alone", "processes", value=1), {0: OPEN}),
    ("C20", times(0.6, *SPED), {1: REFUTED}),
    ("C21", at("device", value="cpu"), {1: MISSING}),
    ("C21", at("cases", "ddp", "losses", value=lambda losses: losses[::-1]), {0: OPEN}),
    ("C21", at("cases", "ddp", "losses", 1, value=None), {0: REFUTED}),
    ("C21", at("cases", "dp", value={"completed": False, "said": "out of memory"}), {1: REFUTED}),
    ("C21", at("whole", "ranks", 1, "losses", 1, value=None), {2: REFUTED}),
    ("C21", at("whole", "ranks", value=None), {2: REFUTED}),
    ("C21", at("whole", "free", value=2**30), {2: MISSING}),
    ("C21", at("whole", "steps", value=0), {2: MISSING}),
    ("C22", at("cases", 0, "peak", value=lambda peak: 1.3 * peak), {0: REFUTED}),
    ("C22", at("cases", value=[]), {0: MISSING}),
    ("C22", at("limited", value={}), {1: MISSING, 2: MISSING, 3: MISSING, 4: MISSING}),
    ("C22", limited("fits, DDP", True, "no memory"), {1: REFUTED}),
    ("C22", at("limited", "too many, DDP", "trained", value=True), {2: REFUTED}),
    ("C22", limited("too many, DDP", False, "a peer was lost"), {2: OPEN}),
    ("C22", limited("too many, halves", True, "no memory"), {3: REFUTED}),
    ("C22", at("limited", "too many, halves", "losses", 1, value=lambda loss: 1.00001 * loss), {3: REFUTED}),
    ("C22", limited("too many, no limit", False, "lost"), {3: OPEN, 4: OPEN}),
    ("C22", limited("too many, sharded", True, "no memory"), {4: OPEN}),
    ("C22", at("limited", "too many, sharded", "losses", 1, value=lambda loss: 1.00001 * loss), {4: OPEN}),
]


def verdicts(judgement: Judgement) -> list[str]:
    """The verdicts of the parts, or that of the whole where it has none."""
    return [part.verdict for part in judgement.parts] or [judgement.verdict]


@pytest.mark.parametrize(("number", "change", "turned"), TURNS)
def test_another_measurement_turns_its_part_and_no_other(number: str, change: Change, turned: dict[int, str]) -> None:
    expected = verdicts(judged(number))
    for place, verdict in turned.items():
        assert expected[place] != verdict
        expected[place] = verdict
    assert verdicts(judged(number, change)) == expected


@pytest.mark.parametrize("number", CLAIMS)
def test_each_part_is_confirmed_but_these(number: str) -> None:
    found = dict(enumerate(verdicts(judged(number))))
    assert {place: verdict for place, verdict in found.items() if verdict != CONFIRMED} == UNCHANGED.get(number, {})


@pytest.mark.parametrize(
    ("number", "change", "words"),
    [
        ("C02", all_of(at("count", value=0), at("points", value=[])), "two cores"),
        ("C06", instead({"devices": 1, "replicas": 0, "experiments": {}}), ""),
        ("C07", instead({"cuda_devices": 0}), "2 CUDA devices"),
        ("C11", at("judged", value=None), "ip and tc"),
    ],
)
def test_what_cannot_be_measured_here_is_said(number: str, change: Change, words: str) -> None:
    found = judged(number, change)
    assert found.verdict == MISSING
    assert words in found.reason


@pytest.mark.parametrize("number", ["C19", "C21"])
def test_what_cuda_measures_is_no_stand_in(number: str) -> None:
    assert [figure for figure in judged(number, at("device", value="cpu")).figures if figure.stand_in]
    assert not [figure for figure in judged(number).figures if figure.stand_in]


def test_jitter_leaves_a_trend_out_and_knows_divergence() -> None:
    bent = [(1 - step / 100) ** 3 for step in range(100)]
    assert jitter(bent) < 1e-12
    assert jitter([*bent[:50], *wave(0.1)]) > 0.009
    assert jitter([1.0, DIVERGED]) == DIVERGED
