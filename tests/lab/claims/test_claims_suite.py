"""The framework of the claims: claims are described, measured, judged, written and read, also when a part fails."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_core.base.errors import UserError
from ddp_lab.claims import main
from ddp_lab.claims.framework import suite
from ddp_lab.claims.framework.claim import Claim, Judgement, KnownClaim, composed
from ddp_lab.claims.framework.document import page
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import FAMILY, ratio_interval
from ddp_lab.records import COUNT, Axis, Figure, Line, Part, Series
from ddp_lab.report.reading.claims import read_findings
from tests.lab.claims.measurements import judged


def made_up(measure: Any) -> KnownClaim:
    claim = Claim(
        "C99", "made up", "One is one.", "一是一。", ("000",), "counting", "confirmed when equal", seconds=(1, 2)
    )

    def rule(measurements: dict[str, Any]) -> Judgement:
        series = [Series("plot", Axis("x", "s", [1, 2]), Axis("y"), [Line("line", [1.0, None])])]
        right = measurements["one"] == 1
        return Judgement("confirmed" if right else "refuted", "counted", [Figure("one", measurements["one"])], series)

    return KnownClaim(claim, measure, rule)


def committed(setting: Setting, **other: Any) -> None:
    """Give the record of C99 a rule of the year before, and other fields."""
    path = setting.claims / "C99.json"
    content = suite.read(path)
    assert content is not None
    rule = {"commit": "0123456789abcdef", "committed_at": "2025-11-22T15:25:06+00:00", "dirty": False}
    suite.write(path, content | {"rule_commit": rule} | other)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(quick=True, output=tmp_path, cores=2)


def test_measured_judged_and_written_as_the_report_reads_it(setting: Setting) -> None:
    content = suite.measure_one(made_up(lambda _: {"one": 1}), setting, {"cpu": "any"})
    assert json.loads((setting.claims / "C99.json").read_text()) == content
    assert content["format"] == "ddp-claim/1"
    assert content["verdict"] == "confirmed"
    assert content["measurements"] == {"one": 1}
    (found,) = read_findings(setting.output).claims
    assert found.title == "made up"
    assert found.series[0].lines[0].values == [1.0, None]


def test_a_measurement_that_raises_is_inconclusive_in_one_line(setting: Setting) -> None:
    def measure(_: Setting) -> dict[str, Any]:
        raise UserError("the moon is full\nand more")

    said: list[str] = []
    assert suite.measure_all([made_up(measure)], setting, said.append) == suite.FAILED
    content = suite.read(setting.claims / "C99.json")
    assert content is not None
    assert content["verdict"] == "inconclusive"
    assert content["reason"] == "the measurement failed: the moon is full"
    assert content["error"] == "the moon is full"
    assert "Traceback" not in "".join(said)
    assert "Traceback" in (setting.claims / "C99.error.txt").read_text()


def test_a_verdict_follows_from_stored_measurements(setting: Setting) -> None:
    known = made_up(lambda _: {"one": 1})
    suite.measure_all([known], setting, lambda _: None)
    path = setting.claims / "C99.json"
    content = suite.read(path)
    assert content is not None
    suite.write(path, content | {"measurements": {"one": 2}})
    suite.judge_again([known], setting.output, lambda _: None)
    again = suite.read(path)
    assert again is not None
    assert again["verdict"] == "refuted"


def test_a_rule_that_raises_keeps_the_measurements(setting: Setting) -> None:
    content = suite.measure_one(made_up(lambda _: {"two": 2}), setting, {})
    assert content["measurements"] == {"two": 2}
    assert content["verdict"] == "inconclusive"
    assert content["reason"] == "the judgement failed: KeyError: 'one'"


def test_what_was_never_measured_is_not_judged(setting: Setting) -> None:
    with pytest.raises(UserError, match="measure first"):
        suite.judge_again([made_up(None)], setting.output, lambda _: None)


def test_an_unknown_claim_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["C77"]) == 2
    assert "there is no claim C77" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        (["confirmed", "confirmed"], "confirmed"),
        (["confirmed", "refuted"], "confirmed in part"),
        (["confirmed", "not measurable here"], "confirmed in part"),
        (["confirmed in part", "refuted"], "confirmed in part"),
        (["refuted", "inconclusive", "not measurable here"], "refuted"),
        (["not measurable here", "inconclusive"], "inconclusive"),
        (["not measurable here"], "not measurable here"),
    ],
)
def test_a_sentence_of_several_parts(parts: list[Any], whole: str) -> None:
    judgement = composed([Part(f"part {number}", verdict, "so") for number, verdict in enumerate(parts)])
    assert judgement.verdict == whole
    assert judgement.reason.startswith(f"part 0: {parts[0]} (so)")


def test_a_rule_that_changed_after_measuring_is_told_and_judges_nothing(setting: Setting) -> None:
    known = made_up(lambda _: {"one": 1})
    suite.measure_all([known], setting, lambda _: None)
    committed(setting)
    assert "**Confirmed**: counted." in page([known], setting.output)

    def crashes(measurements: dict[str, Any]) -> Judgement:
        raise KeyError("two")

    said: list[str] = []
    stricter = replace(known, claim=replace(known.claim, loads={"rounds": (8, 21)}), judge=crashes)
    suite.judge_again([stricter], setting.output, said.append)
    assert said == [f"C99 confirmed: {suite.RULE_CHANGED}"]
    assert f"**Confirmed ({suite.RULE_CHANGED})**: counted." in page([stricter], setting.output)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"rule_commit": None}, "does not say which commit its rule is of"),
        ({"run": None}, "does not say which commit its rule is of, and when its run began"),
        ({"rule_commit": {"commit": "a", "committed_at": "2025-11-22T15:25:06+00:00", "dirty": True}}, "not committed"),
        (
            {
                "rule_commit": {"commit": "a", "committed_at": "2026-11-22T16:40:03+01:00", "dirty": False},
                "run": {"started_at": "2026-11-22T15:40:02Z"},
            },
            "its rule is of 2026-11-22T16:40:03[+]01:00, and its run began at 2026-11-22T15:40:02Z",
        ),
        ({"figures": [{"name": "bytes", "value": 0.0, "unit": "MB"}]}, "bytes is 0, and has to be greater than 0"),
    ],
)
def test_the_page_is_not_made_from_what_proves_nothing(setting: Setting, other: Any, words: str) -> None:
    known = made_up(lambda _: {"one": 1})
    suite.measure_all([known], setting, lambda _: None)
    committed(setting, **other)
    with pytest.raises(UserError, match=f"C99: .*{words}"):
        page([known], setting.output)


@pytest.mark.parametrize(
    ("figure", "words"),
    [
        (Figure("bytes", 0), "greater than 0"),
        (Figure("bytes", float("nan")), "no number"),
        (Figure("bytes", 1.0, low=None, high=2.0, level=0.99), "no number"),
        (Figure("share", 101.0, "%"), "at most 100"),
        (Figure("copies", 9.0, bounds=(0.9, 6)), "at least 0.9 and at most 6"),
        (Figure("weights", ""), "no number"),
        (Figure("bytes", 1e-30), ""),
        (Figure("faults", 0, bounds=COUNT), ""),
        (Figure("weights", "0ac92db29237"), ""),
    ],
)
def test_a_figure_that_cannot_be(figure: Figure, words: str) -> None:
    assert words in figure.fault
    assert bool(words) == bool(figure.fault)


def test_a_figure_that_cannot_be_fails_the_run(setting: Setting) -> None:
    known = replace(made_up(lambda _: {}), judge=lambda _: Judgement("confirmed", "counted", [Figure("bytes", 0)]))
    said: list[str] = []
    assert suite.measure_all([known], setting, said.append) == suite.FAILED
    assert "C99: bytes is 0, and has to be greater than 0" in said


def test_verdicts_of_a_run_are_those_that_holm_allows_for_all_of_its_claims(setting: Setting) -> None:
    """Ten rounds that agree are too few for the strictest step, and enough for the last of a family that has agreed."""

    def tested(number: str, rounds: int) -> KnownClaim:
        def judge(measurements: dict[str, Any]) -> Judgement:
            ratio = ratio_interval([2.0] * rounds, [1.0] * rounds)
            return Judgement(
                "confirmed" if ratio.above() else "inconclusive", "timed", [ratio.figure("r", against=1.0)]
            )

        return KnownClaim(replace(made_up(None).claim, id=number), lambda _: {}, judge)

    few = tested("C98", 10)
    suite.measure_all([few], setting, lambda _: None)
    alone = suite.read(setting.claims / "C98.json")
    suite.measure_all([few, *(tested(f"C{number}", 11) for number in range(60, 85))], setting, lambda _: None)
    together = suite.read(setting.claims / "C98.json")
    assert alone is not None
    assert together is not None
    assert (alone["verdict"], together["verdict"]) == ("inconclusive", "confirmed")
    assert together["allowed_p"] > alone["allowed_p"]


def test_the_family_is_what_the_claims_declare() -> None:
    claims = suite.known_claims()
    assert sum(known.claim.tests for known in claims) == FAMILY
    for known in claims:
        figures = judged(known.claim.id).figures
        tests = [figure for figure in figures if figure.p is not None]
        assert len(tests) <= known.claim.tests, known.claim.id
        assert all(not figure.stand_in for figure in tests), known.claim.id
        assert bool(tests) == bool(known.claim.tests), known.claim.id
        assert not [figure.fault for figure in figures if figure.fault], known.claim.id


def test_every_rule_is_the_one_that_was_fixed_on_its_day() -> None:
    changed = {
        known.claim.id: known.claim.digest
        for known in suite.known_claims()
        if not known.claim.history or known.claim.history[-1].digest != known.claim.digest
    }
    assert not changed, f"a rule, method or load changed: add a version with today's date and the reason: {changed}"
