"""The rules of the claims on made-up measurements: which part of a claim another measurement turns, and how."""

from __future__ import annotations

import pytest

from ddp_lab.claims.c17_asynchronous import jitter
from ddp_lab.claims.framework import suite
from ddp_lab.claims.framework.claim import Judgement
from ddp_lab.claims.measuring.parameter_server import DIVERGED
from tests.lab.claims.changes import (
    BOTH_WAIT,
    CALM_SERVER,
    NO_WAIT,
    Change,
    at,
    both,
    c03_mended,
    calm_more,
    ended,
    fewer_rounds,
    fewer_seeds,
    instead,
    judged,
    limited,
    loop,
    server_wave,
    shared_path,
    survives,
    wild_synchronous,
)
from tests.lab.claims.measurements import (
    MEASUREMENTS,
    OTHER,
    SAME,
    around,
    c02,
    c06,
    c09,
    c11,
    c19,
    c21,
    noise,
    wave,
)

CONFIRMED, REFUTED, MISSING, OPEN = "confirmed", "refuted", "not measurable here", "inconclusive"
PARTLY = "confirmed in part"

UNCHANGED = {"c03": {3: REFUTED}, "c04": {1: REFUTED}, "c09": {1: REFUTED}, "c18": {0: REFUTED, 1: REFUTED}}
"""The parts that the made-up measurements do not confirm, by their place in the claim's sentence."""

NOISY_CONTROL = at("points", 0, "seconds", "apart 2", value=noise(1.17))
# From 1.54 to 2 times as fast as one process: 1.7 lies between.
OWN_NOISY_CONTROL = at("toy", "seconds", "apart 2", value=[1.0 + 0.03 * number for number in range(11)])
SENDS_MORE = {"sent": 300.0, "received": 300.0, "gradients": 100, "buffers": 3}
SLOW_COPIES = c11()["judged"]["seconds"]
RISES = at("cases", "ddp", "losses", value=[2.4, 2.4, 5.0, 8.7])

TURNS: list[tuple[str, Change, dict[int, str]]] = [
    ("c01", at("runs", 1, "w", value=2.03), {0: REFUTED}),
    ("c01", at("runs", 1, "b", value=2.97), {0: REFUTED}),
    ("c01", at("runs", 1, "loss", value=0.012), {0: REFUTED}),
    ("c02", instead(c02(small=1.5)), {0: REFUTED}),
    ("c02", instead(c02(torchvisions=1.8)), {1: REFUTED}),
    ("c02", instead(c02(small=0.9)), {0: OPEN}),
    ("c02", instead(c02(apart=0.9)), {0: OPEN, 1: OPEN}),
    ("c02", instead(c02(small=1.5, apart=1.4)), {0: MISSING}),
    ("c02", both(instead(c02(small=1.5)), NOISY_CONTROL), {0: OPEN}),
    ("c02", at("points", 0, "seconds", "weak 2", value=noise(1.17)), {0: OPEN}),
    ("c02", at("points", 1, value=c02(torchvisions=1.5, apart=1.4)["points"][1]), {1: MISSING}),
    ("c02", both(at("toy", "seconds", "weak 2", value=around(3.0)), OWN_NOISY_CONTROL), {2: REFUTED}),
    ("c02", both(at("toy", "seconds", "weak 2", value=around(1.5)), OWN_NOISY_CONTROL), {2: OPEN}),
    ("c02", at("toy", "seconds", "strong 2", value=around(3.0)), {3: REFUTED}),
    ("c03", c03_mended, {3: CONFIRMED}),
    ("c03", at("by_ranks", "2", "on", 1, "weights", value=[2.0]), {0: REFUTED}),
    ("c03", at("by_ranks", "2", "on", 1, "counter_after_construction", value=200.0), {1: REFUTED}),
    ("c03", at("by_ranks", "2", "on", 1, "counters", value=[100.0, 7.0]), {2: REFUTED}),
    ("c03", at("by_ranks", "2", "off", 1, "counters", value=[100.0, 250.0]), {2: REFUTED}),
    ("c04", at("judged", "seconds", "after", value=around(0.9)), {0: REFUTED}),
    ("c04", at("judged", "seconds", "after", value=noise(1.05)), {0: OPEN}),
    ("c04", fewer_rounds, {0: OPEN}),
    ("c04", at("judged", value=None), {0: MISSING}),
    ("c04", at("unshaped", "seconds", "alone", value=around(0.2)), {0: MISSING}),
    ("c04", at("unshaped", value=None), {}),
    ("c04", at("devices", value=1), {0: MISSING}),
    ("c04", at("changes", 0, "changed during backward", value=1), {1: CONFIRMED}),
    ("c04", at("changes", 0, "changed after step", value=0), {1: OPEN}),
    ("c05", at("found_default", value=1.0), {0: REFUTED}),
    ("c05", at("networks", "narrow", "seconds", "one by one", value=around(0.8)), {1: REFUTED}),
    ("c05", at("networks", "narrow", "seconds", "one by one", value=noise(1.0)), {1: OPEN}),
    ("c05", at("networks", value={}), {1: MISSING, 2: MISSING}),
    ("c06", at("experiments", "resnet18", "seconds", "dp", value=around(0.8)), {0: REFUTED}),
    ("c06", at("experiments", "resnet18", "seconds", "dp", value=noise(1.0)), {0: OPEN}),
    ("c06", instead(c06("cpu")), {0: MISSING}),
    ("c07", at("layouts", "dp", value={"memory": [1e9, 2e9], "busy": [1.0, 2.0]}), {0: REFUTED}),
    ("c07", at("layouts", "dp", "busy", value=[1.0, 1.0]), {0: OPEN}),
    ("c07", instead({"cuda_devices": 0}), {0: MISSING}),
    ("c08", at("by_devices", "4", "ddp", value=[SENDS_MORE] * 4), {0: REFUTED}),
    ("c08", both(at("countable", value=False), at("by_devices", value={})), {0: MISSING}),
    ("c08", at("cuda", "weights", value=0.0), {1: REFUTED}),
    ("c08", at("cuda", "gradients", value=0.0), {1: REFUTED}),
    ("c08", at("cuda", value=None), {1: MISSING}),
    ("c09", instead(c09(OTHER, OTHER)), {0: REFUTED}),
    ("c09", instead(c09(SAME, SAME)), {0: REFUTED}),
    ("c09", at("samples", value=5), {1: CONFIRMED}),
    ("c10", at("cases", 0, "repeated", value=1), {1: REFUTED}),
    ("c10", both(*(at("cases", n, "repeated", value=1) for n in (0, 2))), {0: REFUTED, 1: REFUTED}),
    ("c11", instead(c11(bent=True)), {0: REFUTED}),
    ("c11", loop(noise(1.0)), {0: OPEN, 1: OPEN, 2: OPEN, 3: OPEN}),
    ("c11", instead(c11(broadcast=1.0)), {3: REFUTED}),
    ("c11", instead(c11(broadcast=0.75)), {3: OPEN}),
    ("c11", at("unshaped", "seconds", value=SLOW_COPIES), {0: MISSING, 1: MISSING, 2: MISSING, 3: MISSING}),
    ("c11", at("unshaped", value=None), {}),
    ("c12", at("square", value=[8.0, 8.0]), {0: REFUTED}),
    ("c12", at("cases", 1, "difference", value=2e-6), {1: REFUTED}),
    ("c12", at("cases", 2, "factor", value=1.0), {1: REFUTED}),
    ("c12", at("cases", 3, "difference", value=0.03), {2: REFUTED}),
    ("c13", at("devices", value=1), {3: MISSING, 4: MISSING}),
    ("c13", at("cases", 0, "losses", "5", "all_ranks", value=2.00001), {2: REFUTED}),
    ("c13", at("cases", 0, "losses", "5", "own_all_ranks", value=2.1), {1: REFUTED}),
    ("c13", at("cases", 0, "seconds", "all_ranks", value=around(1.5)), {4: REFUTED}),
    ("c13", at("cases", 0, "seconds", "all_ranks", value=noise(1.0)), {4: OPEN}),
    ("c13", at("cases", 0, "seconds", "own_all_ranks", value=around(1.5)), {3: REFUTED}),
    ("c14", at("torch_alone", 0, "resumed_at", value=1), {0: REFUTED}),
    ("c14", at("torch_alone", 0, "resumed_loss", value=190.0), {0: REFUTED}),
    ("c14", at("torch_alone", 0, "killed", value=False), {0: OPEN}),
    ("c14", at("cases", 0, "resumed_at", value=[5, 25]), {1: REFUTED}),
    ("c14", at("cases", 0, "weights_sha256", value=None), {1: REFUTED}),
    ("c14", at("written", "opened", "1", value=["a"]), {2: REFUTED}),
    ("c14", at("written", "opened", value={"0": ["fence.lock"]}), {2: OPEN}),
    ("c14", at("written", "files", value=["by another hand"]), {2: OPEN}),
    ("c14", shared_path("different", 0, 0), {3: REFUTED}),
    ("c14", shared_path("equal", 0, 0), {4: REFUTED}),
    ("c14", shared_path("equal", 3, 0), {4: PARTLY}),
    ("c14", shared_path("alone", 1, 0), {3: OPEN, 4: OPEN}),
    ("c15", at("cases", 1, "weights_sha256", value="def"), {0: REFUTED}),
    ("c15", at("cases", 0, "exit_code", value=1), {0: REFUTED}),
    ("c15", at("cases", 0, "exit_code", value=None), {0: REFUTED}),
    ("c16", ended(8, "linear", 0.07), {1: REFUTED}),
    ("c16", ended(8, "square root", 0.05), {1: REFUTED}),
    ("c16", both(*(ended(k, "twice linear", 0.04) for k in (2, 8))), {0: REFUTED, 1: REFUTED}),
    ("c16", both(*(ended(k, "none", 0.05, 0.06) for k in (2, 8))), {0: OPEN, 1: OPEN}),
    ("c16", at("edge", value=True), {0: OPEN, 1: OPEN}),
    ("c16", fewer_seeds, {0: OPEN, 1: OPEN}),
    ("c17", NO_WAIT, {0: REFUTED}),
    ("c17", BOTH_WAIT, {1: REFUTED}),
    ("c17", CALM_SERVER, {2: REFUTED}),
    ("c17", server_wave(lambda seed: 0.05 + 0.02 * seed), {2: OPEN}),
    ("c17", calm_more, {3: REFUTED}),
    ("c17", wild_synchronous, {4: REFUTED}),
    ("c17", at("delayed", 1, "losses", value=[1.0, DIVERGED]), {}),
    ("c18", survives("alone"), {0: CONFIRMED}),
    ("c18", both(survives("alone"), survives("without_restart")), {0: CONFIRMED, 1: CONFIRMED}),
    ("c18", both(*(at(name, 1, "killed", value=False) for name in ("alone", "without_restart"))), {0: OPEN, 1: OPEN}),
    ("c18", at("with_restart", 0, "status", value="failed"), {}),
    ("c19", instead(c19("cpu")), {2: MISSING, 3: MISSING}),
    ("c19", at("cases", 3, "digests", value=["a", "b"]), {0: REFUTED}),
    ("c19", instead(c19(ddp=0.0)), {1: REFUTED}),
    ("c19", instead(c19(dp=0.0)), {2: REFUTED, 3: REFUTED}),
    ("c19", instead(c19(dp=1e-8)), {3: REFUTED}),
    ("c19", instead(c19(dp=1e-7)), {3: OPEN}),
    ("c19", at("exact", 1, "weights_sha256", value="e"), {4: REFUTED}),
    ("c20", at("cores", value=1), {1: MISSING}),
    ("c20", at("alone", "main_process_fetched", value=True), {0: REFUTED}),
    ("c20", at("alone", "batches_ready", value=0.0), {0: REFUTED}),
    ("c20", at("alone", "processes", value=1), {0: OPEN}),
    ("c20", at("samples_per_second", "2", value=around(80.0)), {1: REFUTED}),
    ("c20", at("samples_per_second", "2", value=noise(100.0)), {1: OPEN}),
    ("c21", RISES, {0: OPEN}),
    ("c21", instead(c21("cpu", 4)), {1: MISSING}),
    ("c21", both(instead(c21("cpu", 4)), at("cases", "ddp", "losses", 1, value=None)), {0: REFUTED, 1: MISSING}),
    ("c21", at("cases", "dp", value={"completed": False, "said": "out of memory"}), {1: REFUTED}),
    ("c21", at("cases", "dp", "losses", 1, value=None), {1: REFUTED}),
    ("c21", at("whole", "ranks", 1, "losses", 1, value=None), {2: REFUTED}),
    ("c21", at("whole", "ranks", value=None), {2: REFUTED}),
    ("c21", at("whole", "free", value=2**30), {2: MISSING}),
    ("c21", at("whole", "steps", value=0), {2: MISSING}),
    ("c22", at("cases", 0, "peak", value=140), {0: REFUTED}),
    ("c22", at("cases", 0, "peak", value=80), {0: REFUTED}),
    ("c22", at("cases", value=[]), {0: MISSING}),
    ("c22", at("limited", value={}), {1: MISSING, 2: MISSING, 3: MISSING}),
    ("c22", limited("fits, DDP", True, "no memory"), {1: REFUTED}),
    ("c22", at("limited", "too many, DDP", "trained", value=True), {2: REFUTED}),
    ("c22", limited("too many, DDP", False, "a peer was lost"), {2: OPEN}),
    ("c22", limited("too many, halves", True, "no memory"), {3: REFUTED}),
    ("c22", at("limited", "too many, halves", "losses", value=[2.0, 1.1]), {3: REFUTED}),
    ("c22", limited("too many, no limit", False, "lost"), {3: OPEN}),
]


def verdicts(judgement: Judgement) -> list[str]:
    """The verdicts of the parts, or that of the whole where it has none."""
    return [part.verdict for part in judgement.parts] or [judgement.verdict]


def with_turned(count: int, *turned: dict[int, str]) -> list[str]:
    known = {place: verdict for each in turned for place, verdict in each.items()}
    return [known.get(place, CONFIRMED) for place in range(count)]


def test_every_claim_has_measurements_here() -> None:
    assert [known.claim.id for known in suite.known_claims()] == [number.upper() for number in MEASUREMENTS]


@pytest.mark.parametrize("number", MEASUREMENTS)
def test_measurements_as_the_sentence_has_them_confirm_it(number: str) -> None:
    found = verdicts(judged(number))
    assert found == with_turned(len(found), UNCHANGED.get(number, {}))


@pytest.mark.parametrize(("number", "change", "turned"), TURNS)
def test_another_measurement_turns_its_part_and_no_other(number: str, change: Change, turned: dict[int, str]) -> None:
    count = len(judged(number).parts) or 1
    assert verdicts(judged(number, change)) == with_turned(count, UNCHANGED.get(number, {}), turned)


@pytest.mark.parametrize(
    ("number", "change", "words"),
    [
        ("c02", instead(c02(devices=1)), "two cores"),
        ("c06", instead({"devices": 1, "replicas": 0, "experiments": {}}), ""),
        ("c07", instead({"cuda_devices": 0}), "2 CUDA devices"),
        ("c11", at("judged", value=None), "ip and tc"),
    ],
)
def test_what_cannot_be_measured_here_is_said(number: str, change: Change, words: str) -> None:
    found = judged(number, change)
    assert found.verdict == MISSING
    assert words in found.reason


def test_c06_c08_c19_and_c21_mark_stand_ins() -> None:
    figures = judged("c06", instead(c06("cpu"))).figures
    assert {figure.stand_in for figure in figures if " dp" in figure.name or "DP" in figure.name} == {
        "threads that stay",
        "nn.DataParallel's step rendered on CPU",
    }
    of_replicas = [figure for figure in judged("c08").figures if figure.stand_in]
    assert {figure.part for figure in of_replicas} == {"DP moves weights and gradients in every step"}
    for number, on_gpu, on_cpu in (("c19", c19(), c19("cpu")), ("c21", c21(), c21("cpu", 4))):
        for measurements, is_marked in ((on_gpu, False), (on_cpu, True)):
            found = judged(number, instead(measurements))
            assert any(figure.stand_in for figure in found.figures) is is_marked


def test_jitter_leaves_a_trend_out_and_knows_divergence() -> None:
    bent = [(1 - step / 100) ** 3 for step in range(100)]
    assert jitter(bent) < 1e-12
    assert jitter([*bent[:50], *wave(0.1)]) > 0.009
    assert jitter([1.0, DIVERGED]) == DIVERGED
