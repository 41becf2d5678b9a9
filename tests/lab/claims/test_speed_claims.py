"""The parts of the claims about speed, links and bytes, on made-up measurements: every verdict each part can have."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.claims.measurements import Measurements, around, c02, c06, c11, noise
from tests.lab.claims.test_claims_rules import CONFIRMED, MISSING, OPEN, REFUTED, Change, at, instead, judged

SENDS_MORE = {"sent": 300.0, "received": 300.0, "gradients": 100, "buffers": 3}
SLOW_COPIES = c11()["judged"]["seconds"]
C13 = (
    "the same loss, the source's own way, where the ranks divide",
    "the same loss, the source's own way, where they do not",
    "the same loss, this project",
    "in less time, this project",
    "in less time, the source's own way",
)
C04, C20 = ("communicates during backward", "updates the parameters"), ("workers fetch ahead", "training is faster")


def one_by_one(seconds: list[float]) -> Change:
    return at("networks", "narrow", "seconds", "one by one", value=seconds)


def loop(value: list[float]) -> Change:
    def change(measurements: Measurements) -> None:
        by_count: dict[str, Any] = measurements["judged"]["seconds"]["send loop"]
        by_count.update(dict.fromkeys(by_count, value))

    return change


def both(*changes: Change) -> Change:
    def change(measurements: Measurements) -> None:
        for each in changes:
            each(measurements)

    return change


def seven_rounds(measurements: Measurements) -> None:
    for values in measurements["judged"]["seconds"].values():
        del values[10:]


OWN_SLOW, OWN_LATE = (at("toy", "seconds", "weak 2", value=around(seconds)) for seconds in (3.0, 1.5))
# From 1.54 to 2 times as fast as one process: 1.7 lies between.
OWN_NOISY_CONTROL = at("toy", "seconds", "apart 2", value=[1.0 + 0.03 * number for number in range(11)])
NOISY_CONTROL = at("points", 0, "seconds", "apart 2", value=noise(1.17))
TURNS: list[tuple[str, str, str, Change | None, str]] = [
    ("c02", "small", "good", None, CONFIRMED),
    ("c02", "small", "slow", instead(c02(small=1.5)), REFUTED),
    ("c02", "small", "faster than possible", instead(c02(small=0.9)), OPEN),
    ("c02", "small", "apart faster than possible", instead(c02(apart=0.9)), OPEN),
    ("c02", "small", "noise", at("points", 0, "seconds", "weak 2", value=noise(1.17)), OPEN),
    ("c02", "small", "cores are taken", instead(c02(small=1.5, apart=1.4)), MISSING),
    ("c02", "small", "the control is noise", both(instead(c02(small=1.5)), NOISY_CONTROL), OPEN),
    ("c02", "torchvision", "slow at the other stem", instead(c02(small=1.5)), CONFIRMED),
    ("c02", "the source's own program", "good", None, CONFIRMED),
    ("c02", "the source's own program", "slower than one", both(OWN_SLOW, OWN_NOISY_CONTROL), REFUTED),
    ("c02", "the source's own program", "slow, the control is noise", both(OWN_LATE, OWN_NOISY_CONTROL), OPEN),
    ("c02", "the source's own program", "slow", at("toy", "seconds", "weak 2", value=around(3.0)), REFUTED),
    (
        "c02",
        "the source's own program, its batch cut",
        "slow",
        at("toy", "seconds", "strong 2", value=around(3.0)),
        REFUTED,
    ),
    ("c04", C04[0], "good", None, CONFIRMED),
    ("c04", C04[0], "faster after", at("judged", "seconds", "after", value=around(0.9)), REFUTED),
    ("c04", C04[0], "noise", at("judged", "seconds", "after", value=noise(1.05)), OPEN),
    ("c04", C04[0], "too few rounds", seven_rounds, OPEN),
    ("c04", C04[0], "no links", at("judged", value=None), MISSING),
    ("c04", C04[0], "cores are the limit", at("unshaped", "seconds", "alone", value=around(0.2)), MISSING),
    ("c04", C04[0], "CUDA devices", at("unshaped", value=None), CONFIRMED),
    ("c04", C04[0], "one core", at("devices", value=1), MISSING),
    ("c04", C04[1], "only afterwards", None, REFUTED),
    ("c04", C04[1], "during backward", at("changes", 0, "changed during backward", value=1), CONFIRMED),
    ("c04", C04[1], "never", at("changes", 0, "changed after step", value=0), OPEN),
    ("c05", "buckets of 25 MB", "another default", at("found_default", value=1.0), REFUTED),
    ("c05", "many small", "one by one is faster", one_by_one(around(0.8)), REFUTED),
    ("c05", "many small", "noise", one_by_one(noise(1.0)), OPEN),
    ("c05", "many small", "one core", at("networks", value={}), MISSING),
    ("c05", "few large", "the other network is slower", one_by_one(around(0.8)), CONFIRMED),
    ("c08", "DDP moves", "sends more", at("by_devices", "4", "ddp", value=[SENDS_MORE] * 4), REFUTED),
    ("c08", "DDP moves", "no counters", both(at("countable", value=False), at("by_devices", value={})), MISSING),
    ("c08", "DP moves", "no weights", at("cuda", "weights", value=0.0), REFUTED),
    ("c08", "DP moves", "no gradients", at("cuda", "gradients", value=0.0), REFUTED),
    ("c08", "DP moves", "stand-ins", at("cuda", value=None), MISSING),
    ("c11", "send loop", "a square", instead(c11(bent=True)), REFUTED),
    ("c11", "send loop", "no slope", loop(noise(1.0)), OPEN),
    ("c11", "tree", "the loop has no slope", loop(noise(1.0)), OPEN),
    ("c11", "dist.broadcast", "good", None, CONFIRMED),
    ("c11", "dist.broadcast", "grows as fast", instead(c11(broadcast=1.0)), REFUTED),
    ("c11", "dist.broadcast", "between", instead(c11(broadcast=0.75)), OPEN),
    ("c11", "tree", "the broadcast grows as fast", instead(c11(broadcast=1.0)), CONFIRMED),
    ("c11", "ring", "cores are the limit", at("unshaped", "seconds", value=SLOW_COPIES), MISSING),
    ("c11", "ring", "CUDA devices", at("unshaped", value=None), CONFIRMED),
    ("c13", C13[2], "another", at("cases", 0, "losses", "5", "all_ranks", value=2.00001), REFUTED),
    ("c13", C13[1], "padded", at("cases", 0, "losses", "5", "own_all_ranks", value=2.1), REFUTED),
    ("c13", C13[0], "padded elsewhere", at("cases", 0, "losses", "5", "own_all_ranks", value=2.1), CONFIRMED),
    ("c13", C13[3], "slower", at("cases", 0, "seconds", "all_ranks", value=around(1.5)), REFUTED),
    ("c13", C13[4], "slower", at("cases", 0, "seconds", "own_all_ranks", value=around(1.5)), REFUTED),
    ("c13", C13[3], "noise", at("cases", 0, "seconds", "all_ranks", value=noise(1.0)), OPEN),
    ("c13", C13[4], "one core", at("devices", value=1), MISSING),
    ("c20", C20[0], "good", None, CONFIRMED),
    ("c20", C20[0], "the main process fetches", at("alone", "main_process_fetched", value=True), REFUTED),
    ("c20", C20[0], "nothing is ready", at("alone", "batches_ready", value=0.0), REFUTED),
    ("c20", C20[0], "one worker fetches", at("alone", "processes", value=1), OPEN),
    ("c20", C20[1], "slower", at("samples_per_second", "2", value=around(80.0)), REFUTED),
    ("c20", C20[1], "only another number is faster", at("samples_per_second", "2", value=noise(100.0)), OPEN),
    ("c20", C20[1], "one core", at("cores", value=1), MISSING),
]


@pytest.mark.parametrize(
    ("number", "part", "change", "verdict"),
    [(number, part, change, verdict) for number, part, _, change, verdict in TURNS],
    ids=[f"{number} {part}: {name}" for number, part, name, _, _ in TURNS],
)
def test_verdict_of_a_part(number: str, part: str, change: Change | None, verdict: str) -> None:
    found = next(each for each in judged(number, change).parts if each.name.startswith(part))
    assert found.verdict == verdict
    assert found.reason


def test_c02_is_judged_by_the_points_that_are_measurable() -> None:
    taken = c02(torchvisions=1.5, apart=1.4)["points"][1]
    found = judged("c02", at("points", 1, value=taken))
    assert [part.verdict for part in found.parts] == [CONFIRMED, MISSING, CONFIRMED, CONFIRMED]
    assert found.verdict == CONFIRMED


def test_c04_tells_the_hidden_share() -> None:
    (share,) = [figure.value for figure in judged("c04").figures if figure.name.startswith("hidden share")]
    assert share == pytest.approx(50, abs=5)


def test_c06_and_c08_mark_stand_ins() -> None:
    figures = judged("c06", instead(c06("cpu"))).figures
    assert {figure.stand_in for figure in figures if " dp" in figure.name or "DP" in figure.name} == {
        "threads that stay",
        "nn.DataParallel's step rendered on CPU",
    }
    of_replicas = [figure for figure in judged("c08").figures if figure.stand_in]
    assert {figure.part for figure in of_replicas} == {"DP moves weights and gradients in every step"}


def test_c05_calls_a_difference_marginal_and_prints_the_digits_that_tell_it() -> None:
    near = [1.0002 + 0.001 * number for number in range(11)]
    narrow = at("networks", "narrow", "seconds", value={"25 MB": [1.0] * 11, "1 MB": [1.0] * 11, "one by one": near})
    part = judged("c05", narrow).parts[1]
    assert part.verdict == CONFIRMED
    assert "(1.0002 to" in part.reason
    assert "marginal, the interval ends 0.02 % from 1" in part.reason
    assert "marginal" not in judged("c05").parts[1].reason
