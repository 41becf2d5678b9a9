"""The rules of the claims on made-up measurements: every verdict that a rule can give."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_lab.claims.c17_asynchronous import jitter
from ddp_lab.claims.framework import suite
from ddp_lab.claims.measuring.parameter_server import DIVERGED
from tests.lab.claims.changes import (
    BOTH_WAIT,
    C03_WRONG,
    CALM_SERVER,
    CONFIRMED,
    MISSING,
    NO_WAIT,
    OPEN,
    PARTLY,
    REFUTED,
    RISES,
    Change,
    at,
    both,
    c03_mended,
    calm_more,
    ended,
    fewer_seeds,
    instead,
    judge,
    judged,
    limited,
    shared_path,
    wild_synchronous,
)
from tests.lab.claims.measurements import (
    MEASUREMENTS,
    OTHER,
    SAME,
    Measurements,
    around,
    c02,
    c06,
    c08,
    c09,
    c19,
    c21,
    noise,
    wave,
)

SLOW_TOY = both(*(at("toy", "seconds", way, value=around(4.0)) for way in ("weak 2", "strong 2")))
TAKEN_TOY = both(
    *(at("toy", "seconds", way, value=around(value)) for way, value in (("weak 2", 1.5), ("strong 2", 0.9))),
    at("toy", "seconds", "apart 2", value=around(1.4)),
)


def survives(name: str) -> Change:
    """A change of C18: rank 0 goes on."""

    def change(measurements: Measurements) -> None:
        for run in measurements[name]:
            run |= {"status": "completed", "exit_code": 0, "last_step": 66}

    return change


ONE_CORE = {"devices": 1, "replicas": 0, "experiments": {}}
UNTRIED = at("whole", "steps", value=0)
NO_LINKS = at("judged", value=None)
NOTHING_COUNTS = c08() | {"countable": False, "by_devices": {}, "cuda": None, "cuda_devices": 0}

TURNS: list[tuple[str, str, Change | None, str]] = [
    (number, "good", None, {"c03": PARTLY, "c04": PARTLY, "c09": PARTLY, "c18": REFUTED}.get(number, CONFIRMED))
    for number in MEASUREMENTS
]
TURNS += [
    ("c01", "another weight", at("runs", 1, "w", value=2.03), REFUTED),
    ("c01", "another bias", at("runs", 1, "b", value=2.97), REFUTED),
    ("c01", "another loss", at("runs", 1, "loss", value=0.012), REFUTED),
    ("c02", "slow at both stems", both(instead(c02(small=1.5, torchvisions=1.4)), SLOW_TOY), REFUTED),
    ("c02", "slow at one stem", instead(c02(torchvisions=1.8)), PARTLY),
    ("c02", "faster than possible", both(instead(c02(small=0.9, torchvisions=0.9)), SLOW_TOY), REFUTED),
    ("c02", "apart faster than possible", instead(c02(apart=0.9)), PARTLY),
    ("c02", "noise", at("points", 0, "seconds", "weak 2", value=noise(1.17)), PARTLY),
    ("c02", "cores are taken", both(instead(c02(small=1.5, torchvisions=1.5, apart=1.4)), TAKEN_TOY), MISSING),
    (
        "c02",
        "cores are taken at one stem",
        at("points", 1, value=c02(torchvisions=1.5, apart=1.4)["points"][1]),
        CONFIRMED,
    ),
    ("c02", "one core", instead(c02(devices=1)), MISSING),
    ("c03", "parameters are sent again", c03_mended, CONFIRMED),
    ("c03", "nothing holds", both(*C03_WRONG), REFUTED),
    ("c06", "one counter-example", at("experiments", "resnet18", "seconds", "dp", value=around(0.8)), REFUTED),
    ("c06", "noise", at("experiments", "resnet18", "seconds", "dp", value=noise(1.0)), OPEN),
    ("c06", "stand-ins", instead(c06("cpu")), MISSING),
    ("c06", "one core", instead(ONE_CORE), MISSING),
    ("c07", "another device", at("layouts", "dp", value={"memory": [1e9, 2e9], "busy": [1.0, 2.0]}), REFUTED),
    ("c07", "memory alone", at("layouts", "dp", "busy", value=[1.0, 1.0]), OPEN),
    ("c07", "no CUDA device", instead({"cuda_devices": 0}), MISSING),
    ("c04", "no links", NO_LINKS, REFUTED),
    ("c08", "no CUDA devices, no counters", instead(NOTHING_COUNTS), MISSING),
    ("c09", "another order without", instead(c09(OTHER, OTHER)), REFUTED),
    ("c09", "the same order with", instead(c09(SAME, SAME)), REFUTED),
    ("c09", "samples never seen", at("samples", value=5), CONFIRMED),
    ("c10", "samples repeated", at("cases", 0, "repeated", value=1), PARTLY),
    ("c10", "repeated everywhere", both(*(at("cases", n, "repeated", value=1) for n in (0, 2))), REFUTED),
    ("c11", "no links", NO_LINKS, MISSING),
    ("c13", "one core", at("devices", value=1), PARTLY),
    ("c20", "one core", at("cores", value=1), PARTLY),
    ("c12", "gradients replaced", at("square", value=[8.0, 8.0]), PARTLY),
    ("c12", "DDP differs", at("cases", 1, "difference", value=2e-6), PARTLY),
    ("c12", "an unscaled mean is right", at("cases", 2, "factor", value=1.0), PARTLY),
    ("c12", "BatchNorm differs", at("cases", 3, "difference", value=0.03), PARTLY),
    ("c14", "other weights", at("cases", 1, "weights_sha256", value="b"), PARTLY),
    ("c14", "nothing damaged with equal weights", shared_path("equal", 0, 0), PARTLY),
    (
        "c14",
        "nothing holds",
        both(
            at("cases", 0, "weights_sha256", value=None),
            at("torch_alone", 0, "resumed_at", value=0),
            at("written", "opened", "1", value=["step-00005.pt"]),
            shared_path("different", 0, 0),
            shared_path("equal", 0, 0),
        ),
        REFUTED,
    ),
    ("c15", "other digest", at("cases", 1, "weights_sha256", value="def"), REFUTED),
    ("c15", "does not start", at("cases", 0, "exit_code", value=1), REFUTED),
    ("c15", "never ends", at("cases", 0, "exit_code", value=None), REFUTED),
    ("c16", "lost at 8", ended(8, "linear", 0.07), PARTLY),
    ("c16", "the square root is better at 8", ended(8, "square root", 0.05), PARTLY),
    ("c16", "twice as much is better everywhere", both(*(ended(k, "twice linear", 0.04) for k in (2, 8))), REFUTED),
    ("c16", "not scaling is no worse", both(*(ended(k, "none", 0.05, 0.06) for k in (2, 8))), OPEN),
    ("c16", "perhaps kept", both(*(ended(k, "linear", 0.05, 0.07) for k in (2, 8))), OPEN),
    ("c16", "the search ended at an edge", at("edge", value=True), OPEN),
    ("c16", "too few seeds", fewer_seeds, OPEN),
    ("c17", "less jitter with more workers", calm_more, PARTLY),
    ("c17", "less jitter in the server", CALM_SERVER, PARTLY),
    ("c17", "synchronous updates jitter", wild_synchronous, PARTLY),
    ("c17", "synchronous does not wait", NO_WAIT, PARTLY),
    ("c17", "asynchronous waits", BOTH_WAIT, PARTLY),
    ("c17", "nothing holds", both(NO_WAIT, BOTH_WAIT, CALM_SERVER, calm_more, wild_synchronous), REFUTED),
    ("c17", "diverged", at("delayed", 1, "losses", value=[1.0, DIVERGED]), CONFIRMED),
    ("c18", "survives", at("without_restart", 0, "status", value="completed"), REFUTED),
    ("c18", "not killed", both(*(at(name, 1, "killed", value=False) for name in ("alone", "without_restart"))), OPEN),
    ("c18", "torch alone survives", survives("alone"), PARTLY),
    ("c18", "not recovered", at("with_restart", 0, "status", value="failed"), REFUTED),
    ("c19", "on CPU", instead(c19("cpu")), PARTLY),
    ("c19", "DDP is farther", instead(c19(dp=1e-8)), PARTLY),
    (
        "c19",
        "nothing holds on CPU",
        both(
            instead(c19("cpu", ddp=0.0)),
            at("cases", 0, "digests", value=["a", "b"]),
            at("exact", 1, "weights_sha256", value="e"),
        ),
        REFUTED,
    ),
    ("c21", "dp fails", at("cases", "dp", value={"completed": False, "said": "out of memory"}), PARTLY),
    ("c21", "no memory", at("whole", "free", value=2**30), PARTLY),
    ("c21", "on CPU", instead(c21("cpu", 4)), PARTLY),
    (
        "c21",
        "not finite on CPU",
        both(instead(c21("cpu", 4)), UNTRIED, at("cases", "ddp", "losses", 1, value=None)),
        REFUTED,
    ),
    ("c21", "it does not learn on CPU", both(instead(c21("cpu", 4)), UNTRIED, RISES), OPEN),
    ("c22", "too small", at("cases", 0, "peak", value=140), PARTLY),
    ("c22", "no limit, and nothing tells", both(at("cases", value=[]), at("limited", value={})), MISSING),
    (
        "c22",
        "nothing holds",
        both(
            at("cases", 0, "peak", value=80),
            *(limited(way, out_of_memory=False, said="lost") for way in ("fits, DDP", "too many, halves")),
            at("limited", "too many, DDP", "trained", value=True),
        ),
        REFUTED,
    ),
]


def test_every_claim_has_measurements_here() -> None:
    assert [known.claim.id for known in suite.known_claims()] == [number.upper() for number in MEASUREMENTS]


@pytest.mark.parametrize(
    ("number", "change", "verdict"),
    [(number, change, verdict) for number, _, change, verdict in TURNS],
    ids=[f"{number} {name}" for number, name, _, _ in TURNS],
)
def test_verdict(number: str, change: Change | None, verdict: str) -> None:
    assert judged(number, change).verdict == verdict


@pytest.mark.parametrize(
    ("number", "change", "words"),
    [
        ("c02", instead(c02(small=1.5, apart=1.4)), "free at the same time"),
        ("c02", instead(c02(small=0.9)), "slowed down by something else"),
        ("c02", instead(c02(devices=1)), "two cores"),
        ("c07", instead({"cuda_devices": 0}), "2 CUDA devices"),
        ("c04", NO_LINKS, "ip and tc"),
        ("c06", instead(c06("cpu")), "2 CUDA devices"),
        ("c11", NO_LINKS, "ip and tc"),
        ("c18", None, "of 2 kills"),
        ("c20", None, "2 cores"),
        ("c21", instead(c21("cpu", 4)), "batch 4 instead of 256"),
    ],
    ids=["c02 taken", "c02 too fast", "c02 one core", "c07", "c04", "c06", "c11", "c18", "c20", "c21"],
)
def test_the_reason_says_what_it_rests_on(number: str, change: Change | None, words: str) -> None:
    assert words in judged(number, change).reason


def test_c02_reports_the_toy_with_one_core_too() -> None:
    figures = judge("c02", c02(devices=1)).figures
    assert any(figure.name.startswith("speed-up of the linear model") for figure in figures)


def test_c02_shows_whole_runs_with_their_digests() -> None:
    def row(mode: str, layout: str, count: int, batch: int, speed: float, digest: str) -> dict[str, Any]:
        facts = {"mode": mode, "layout": layout, "count": count, "global_batch_size": batch}
        use = {"cpu_utilisation": 0.5, "gpu_utilisation": None}
        return facts | use | {"samples_per_second": speed, "weights_sha256": digest * 64}

    runs = [
        row("strong", "single", 1, 64, 100.0, "a"),
        row("strong", "ddp", 2, 64, 150.0, "a"),
        row("weak", "single", 1, 128, 110.0, "b"),
        row("weak", "dp", 2, 128, 160.0, "b"),
    ]
    found = judge("c02", c02() | {"runs": runs})
    figures = {figure.name: figure.value for figure in found.figures}
    assert figures["digits, strong scaling, ddp x 2 (0.50 cores busy each; weights aaaaaaaaaaaa)"] == 150
    assert figures["digits: one digest per global batch, whatever the layout"] is True
    weak = next(series for series in found.series if "whole runs, digits, weak" in series.title)
    assert [line.values[1] for line in weak.lines] == [2, 1.6, None]
    runs[-1]["weights_sha256"] = "c" * 64
    figures = {figure.name: figure.value for figure in judge("c02", c02() | {"runs": runs}).figures}
    assert figures["digits: one digest per global batch, whatever the layout"] is False


def test_c18_is_confirmed_only_by_runs_that_go_on_alone() -> None:
    assert judged("c18", both(survives("alone"), survives("without_restart"))).verdict == CONFIRMED


def test_c21_names_no_smaller_batch_where_there_is_none() -> None:
    assert "instead" not in judged("c21").reason


def test_jitter_leaves_a_trend_out_and_knows_divergence() -> None:
    bent = [(1 - step / 100) ** 3 for step in range(100)]
    assert jitter(bent) < 1e-12
    assert jitter([*bent[:50], *wave(0.1)]) > 0.009
    assert jitter([1.0, DIVERGED]) == DIVERGED
