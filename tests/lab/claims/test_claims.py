"""The claims: their framework, and their rules on made-up measurements, each verdict of each claim."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddp_core.errors import UserError
from ddp_lab.claims import main
from ddp_lab.claims.framework import suite
from ddp_lab.claims.framework.claim import Claim, Judgement, KnownClaim
from ddp_lab.claims.framework.document import document
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import fit_line, median_interval, ratio_interval
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.records import Axis, Figure, Line, Series
from ddp_lab.report.reading.claims import read_findings

VERDICTS = {"confirmed", "refuted", "not measurable here", "inconclusive"}


def judge(number: str, measurements: Any) -> Judgement:
    (known,) = suite.known_claims([number])
    return known.judge(suite.plain(measurements))


def verdict(number: str, measurements: Any) -> str:
    found = judge(number, measurements)
    assert found.verdict in VERDICTS
    assert found.reason
    suite.plain(found.to_json())
    return found.verdict


def made_up(measure: Any) -> KnownClaim:
    claim = Claim("C99", "made up", "One is one.", "一是一。", ("000",), "counting", "confirmed when equal", (1, 2))

    def rule(measurements: dict[str, Any]) -> Judgement:
        series = [Series("plot", Axis("x", "s", [1, 2]), Axis("y"), [Line("line", [1.0, None])])]
        right = measurements["one"] == 1
        return Judgement("confirmed" if right else "refuted", "counted", [Figure("one", measurements["one"])], series)

    return KnownClaim(claim, measure, rule, "One is one.")


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(quick=True, output=tmp_path, cores=2)


class TestStatistics:
    def test_a_clear_difference_is_beyond_noise(self) -> None:
        ratio = ratio_interval([2.0, 2.1, 1.9, 2.0, 2.05, 1.95, 2.0], [1.0] * 7)
        assert ratio.above_one
        assert not ratio.below_one
        assert ratio.low <= ratio.value == 2.0 <= ratio.high

    def test_noise_is_not(self) -> None:
        ratio = ratio_interval([1.0, 1.3, 0.8, 1.1, 0.9, 1.2, 0.7], [1.0] * 7)
        assert not ratio.above_one
        assert not ratio.below_one

    def test_few_rounds_say_nothing(self) -> None:
        assert not ratio_interval([2.0, 2.0, 2.0, 2.0], [1.0] * 4).above_one

    def test_a_slow_round_falls_on_both_sides(self) -> None:
        assert ratio_interval([2.0, 20.0, 2.0, 2.0, 2.0], [1.0, 10.0, 1.0, 1.0, 1.0]).value == 2.0

    def test_the_same_measurements_give_the_same_interval(self) -> None:
        values = [1.0, 1.2, 0.9, 1.4, 1.1]
        assert median_interval(values) == median_interval(values)

    def test_misuse(self) -> None:
        with pytest.raises(ValueError, match="rounds"):
            ratio_interval([1.0], [1.0, 2.0])
        with pytest.raises(ValueError, match="no values"):
            median_interval([])
        with pytest.raises(ValueError, match="two different"):
            fit_line([1, 1], [1, 2])

    def test_a_line_is_not_moved_by_one_slow_point(self) -> None:
        intercept, slope = fit_line([1, 2, 3, 4, 5, 6, 7], [3, 5, 7, 900, 11, 13, 15])
        assert (intercept, slope) == pytest.approx((1, 2))


class TestSuite:
    def test_every_claim_is_told_in_full(self) -> None:
        claims = suite.known_claims()
        assert len({known.claim.id for known in claims}) == len(claims)
        for known in claims:
            claim = known.claim
            assert claim.claim.endswith("."), claim.id
            assert claim.original, claim.id
            assert claim.method, claim.id
            assert claim.rule, claim.id
            assert len(known.behind) > 100, claim.id
            assert set(claim.sources) <= {"000", "001", "002", "003", "004"}, claim.id

    def test_measured_judged_and_written_as_the_report_reads_it(self, setting: Setting) -> None:
        content = suite.measure_one(made_up(lambda _: {"one": 1}), setting, {"cpu": "any"})
        assert json.loads((setting.claims / "C99.json").read_text()) == content
        assert content["format"] == "ddp-claim/1"
        assert content["verdict"] == "confirmed"
        assert content["measurements"] == {"one": 1}
        (found,) = read_findings(setting.output).claims
        assert found.claim.title == "made up"
        assert found.claim.series[0].lines[0].values == [1.0, None]

    def test_a_measurement_that_raises_is_inconclusive_in_one_line(self, setting: Setting) -> None:
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

    def test_a_verdict_follows_from_stored_measurements(self, setting: Setting) -> None:
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

    def test_a_rule_that_raises_keeps_the_measurements(self, setting: Setting) -> None:
        content = suite.measure_one(made_up(lambda _: {"two": 2}), setting, {})
        assert content["measurements"] == {"two": 2}
        assert content["verdict"] == "inconclusive"
        assert content["reason"] == "the judgement failed: KeyError: 'one'"

    def test_judging_what_was_never_measured(self, setting: Setting) -> None:
        with pytest.raises(UserError, match="measure first"):
            suite.judge_again([made_up(None)], setting.output, lambda _: None)

    def test_an_unknown_claim_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["C77"]) == 2
        assert "there is no claim C77" in capsys.readouterr().err

    def test_numbers_that_json_cannot_hold_become_none(self) -> None:
        assert suite.plain({1: (float("nan"), float("inf"), 1.5)}) == {"1": [None, None, 1.5]}

    def test_the_page_in_docs_is_the_present_one(self) -> None:
        page = (Path(__file__).parents[3] / "docs" / "reference" / "claims.md").read_text()
        stale = [known.claim.id for known in suite.known_claims() if known.claim.rule not in page]
        assert not stale, "run `ddp claims --document`"

    def test_the_page_tells_every_claim(self, tmp_path: Path) -> None:
        claims = suite.known_claims()
        page = document(claims, tmp_path)
        for known in claims:
            assert f"## {known.claim.id} {known.claim.title}" in page
            assert known.claim.rule in page


def fails_on_rank_one(rank: int, world_size: int) -> int:
    if rank == 1:
        raise ValueError("rank one is unwell\nwith details")
    return rank


def never_ends(rank: int, world_size: int) -> None:
    import time

    time.sleep(60)


class TestRanks:
    def test_a_failing_rank_is_named_in_one_line(self) -> None:
        with pytest.raises(UserError, match="rank 1 of 2: ValueError: rank one is unwell") as caught:
            run_ranks(fails_on_rank_one, 2, timeout=30)
        assert "\n" not in str(caught.value)

    def test_a_hard_time_limit(self) -> None:
        with pytest.raises(UserError, match="did not answer within 1 s"):
            run_ranks(never_ends, 1, timeout=1)


class TestC03:
    def case(self, **changes: Any) -> dict[str, Any]:
        def rank(number: int, on: bool) -> dict[str, Any]:
            counters = [100.0, 101.0] if on else [100.0 + 50 * number, 200.0 + 50 * number]
            return {"weights": [1.0], "counters": counters, "weights_changed": [1.0 + number]}

        case = {"on": [rank(0, True), rank(1, True)], "off": [rank(0, False), rank(1, False)]}
        for place, value in changes.items():
            switch, name = place.split("_", 1)
            case[switch][1][name] = value
        return {"by_ranks": {"2": case}}

    def test_confirmed(self) -> None:
        assert verdict("C03", self.case()) == "confirmed"

    @pytest.mark.parametrize(
        "change",
        [{"on_weights": [2.0]}, {"on_counters": [100.0, 7.0]}, {"off_counters": [100.0, 250.0]}],
        ids=["parameters differ", "buffers differ although on", "buffers equal although off"],
    )
    def test_refuted(self, change: dict[str, Any]) -> None:
        assert verdict("C03", self.case(**change)) == "refuted"


class TestC09:
    def ids(self, without: Any, with_: Any) -> dict[str, Any]:
        return {"samples": 4, "ids": {"without": without, "with": with_, "with_unshuffled": without}}

    SAME = (((0, 1), (0, 1)), ((2, 3), (2, 3)))
    OTHER = (((0, 1), (2, 1)), ((2, 3), (0, 3)))

    def test_confirmed(self) -> None:
        assert verdict("C09", self.ids(self.SAME, self.OTHER)) == "confirmed"

    def test_refuted(self) -> None:
        assert verdict("C09", self.ids(self.OTHER, self.OTHER)) == "refuted"
        assert verdict("C09", self.ids(self.SAME, self.SAME)) == "refuted"


class TestC10:
    def cases(self, repeated: int) -> dict[str, Any]:
        case = {"ranks": 2, "length": 97, "left_out": 0}
        return {
            "cases": [
                {"sampler": "torch", "repeated": repeated, **case},
                {"sampler": "elastic", "repeated": 0, **case},
            ]
        }

    def test_confirmed(self) -> None:
        assert verdict("C10", self.cases(0)) == "confirmed"

    def test_refuted(self) -> None:
        assert verdict("C10", self.cases(1)) == "refuted"


def around(value: float, rounds: int = 9, spread: float = 0.01) -> list[float]:
    """Rounds of a measurement, all near a value."""
    return [value * (1 + spread * ((number * 5) % rounds / rounds - 0.5)) for number in range(rounds)]


def noise(value: float) -> list[float]:
    """Rounds that say little."""
    return [value * factor for factor in (0.6, 1.5, 0.8, 1.3, 1.0, 0.7, 1.6, 0.9, 1.2)]


class TestC01:
    def runs(self, **changes: float) -> dict[str, Any]:
        run = {"w": 2.001, "b": 2.999, "loss": 0.0101}
        return {"runs": [run | {"layout": "single x 1"}, run | {"layout": "ddp x 2"} | changes]}

    def test_confirmed(self) -> None:
        assert verdict("C01", self.runs()) == "confirmed"

    @pytest.mark.parametrize("change", [{"w": 2.03}, {"b": 2.97}, {"loss": 0.012}], ids=str)
    def test_refuted(self, change: dict[str, float]) -> None:
        assert verdict("C01", self.runs(**change)) == "refuted"


class TestC02:
    def case(self, weak: list[float], devices: int = 2, apart: float = 1.02) -> dict[str, Any]:
        def model(seconds: list[float]) -> dict[str, Any]:
            ways = {"1": around(1.0), "weak 2": seconds, "strong 2": around(0.6), "apart 2": around(apart)}
            return {"samples": {"1": 16, "weak 2": 32, "strong 2": 16, "apart 2": 32}, "seconds": ways}

        models = {"toy": model(around(3.0))} | ({"resnet18": model(weak)} if devices > 1 else {})
        return {"devices": devices, "device": "cpu", "models": models}

    def test_confirmed(self) -> None:
        assert verdict("C02", self.case(around(1.1))) == "confirmed"

    def test_refuted(self) -> None:
        assert verdict("C02", self.case(around(1.5))) == "refuted"

    def test_inconclusive(self) -> None:
        assert verdict("C02", self.case(noise(1.17))) == "inconclusive"

    def test_not_measurable_where_the_cores_are_taken(self) -> None:
        found = judge("C02", self.case(around(1.5), apart=1.4))
        assert found.verdict == "not measurable here"
        assert "free at the same time" in found.reason

    def test_not_measurable_with_one_core(self) -> None:
        found = judge("C02", self.case(around(1.1), devices=1))
        assert found.verdict == "not measurable here"
        assert "two cores" in found.reason
        assert found.series, "the toy is reported all the same"

    def test_whole_runs_are_shown_with_their_digests(self) -> None:
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
        found = judge("C02", self.case(around(1.1)) | {"runs": runs})
        figures = {figure.name: figure.value for figure in found.figures}
        assert figures["digits, strong scaling, ddp x 2 (0.50 cores busy each; weights aaaaaaaaaaaa)"] == 150
        assert figures["digits: one digest per global batch, whatever the layout"] is True
        weak = next(series for series in found.series if "whole runs, digits, weak" in series.title)
        assert [line.values[1] for line in weak.lines] == [2, 1.6, None]
        runs[-1]["weights_sha256"] = "c" * 64
        figures = {
            figure.name: figure.value for figure in judge("C02", self.case(around(1.1)) | {"runs": runs}).figures
        }
        assert figures["digits: one digest per global batch, whatever the layout"] is False


class TestC04:
    def case(self, after: list[float]) -> dict[str, Any]:
        seconds = {"overlapped": around(1.0), "after": after, "none": around(0.8)}
        return {"devices": 2, "ranks": 2, "device": "cpu", "steps": 1, "seconds": seconds}

    def test_confirmed_with_the_hidden_share(self) -> None:
        found = judge("C04", self.case(around(1.2)))
        assert found.verdict == "confirmed"
        (share,) = [figure.value for figure in found.figures if figure.name.startswith("hidden share")]
        assert share == pytest.approx(50, abs=5)

    def test_refuted(self) -> None:
        assert verdict("C04", self.case(around(0.9))) == "refuted"

    def test_inconclusive(self) -> None:
        assert verdict("C04", self.case(noise(1.05))) == "inconclusive"

    def test_communication_that_costs_nothing_has_no_hidden_share(self) -> None:
        assert verdict("C04", self.case(around(0.7))) == "refuted"

    def test_not_measurable_with_one_core(self) -> None:
        assert verdict("C04", {"devices": 1, "ranks": 0}) == "not measurable here"


class TestC05:
    def case(self, narrow: list[float], resnet: list[float]) -> dict[str, Any]:
        def network(one_by_one: list[float]) -> dict[str, Any]:
            seconds = {"1 MB": around(1.1), "25 MB": around(1.0), "one by one": one_by_one}
            return {"steps": 1, "tensors": 9, "messages": dict.fromkeys(seconds, 9), "seconds": seconds}

        return {"devices": 2, "ranks": 2, "networks": {"narrow": network(narrow), "resnet18": network(resnet)}}

    def test_confirmed(self) -> None:
        assert verdict("C05", self.case(around(5.0), noise(1.0))) == "confirmed"

    def test_refuted(self) -> None:
        assert verdict("C05", self.case(around(5.0), around(0.8))) == "refuted"

    def test_inconclusive(self) -> None:
        assert verdict("C05", self.case(noise(1.0), noise(1.0))) == "inconclusive"

    def test_not_measurable_with_one_core(self) -> None:
        assert verdict("C05", {"devices": 1, "ranks": 0, "networks": {}}) == "not measurable here"


class TestC06:
    def case(self, digits: list[float], resnet: list[float]) -> dict[str, Any]:
        found = {
            name: {"steps": 1, "seconds": {"dp": dp, "ddp": around(1.0)}}
            for name, dp in (("digits", digits), ("resnet18", resnet))
        }
        return {"devices": 2, "replicas": 2, "device": "cpu", "experiments": found}

    def test_confirmed(self) -> None:
        assert verdict("C06", self.case(around(1.3), around(1.1))) == "confirmed"

    def test_refuted_by_one_counter_example(self) -> None:
        assert verdict("C06", self.case(around(1.3), around(0.8))) == "refuted"

    def test_inconclusive(self) -> None:
        assert verdict("C06", self.case(around(1.3), noise(1.0))) == "inconclusive"

    def test_not_measurable_with_one_core(self) -> None:
        assert verdict("C06", {"devices": 1, "replicas": 0, "experiments": {}}) == "not measurable here"


class TestC07:
    def case(self, memory: list[float], busy: list[float]) -> dict[str, Any]:
        even = {"memory": [1e9, 1e9], "busy": [1.0, 1.0]}
        return {"cuda_devices": 2, "steps": 10, "layouts": {"dp": {"memory": memory, "busy": busy}, "ddp": even}}

    def test_confirmed(self) -> None:
        assert verdict("C07", self.case([2e9, 1e9], [2.0, 1.0])) == "confirmed"

    def test_refuted(self) -> None:
        assert verdict("C07", self.case([1e9, 2e9], [1.0, 2.0])) == "refuted"

    def test_inconclusive(self) -> None:
        assert verdict("C07", self.case([2e9, 1e9], [1.0, 1.0])) == "inconclusive"

    def test_not_measurable_on_cpu(self) -> None:
        found = judge("C07", {"cuda_devices": 0})
        assert found.verdict == "not measurable here"
        assert "2 CUDA devices" in found.reason


class TestC08:
    def case(self, sent: float = 152.0, weights: float = 310.0, moved: float = 312.0) -> dict[str, Any]:
        rank = {"sent": sent, "received": sent, "gradients": 100, "buffers": 3}
        dp = {"weights": weights, "gradients": moved, "batch": 9.0}
        return {"countable": True, "by_devices": {"4": {"ddp": [rank] * 4, "dp": dp}}}

    def test_confirmed(self) -> None:
        assert verdict("C08", self.case()) == "confirmed"

    @pytest.mark.parametrize(
        "change",
        [{"sent": 300.0}, {"weights": 0.0}, {"weights": 300.0, "moved": -200.0}],
        ids=["DDP sends more", "DP moves no weights", "DP moves less"],
    )
    def test_refuted(self, change: dict[str, float]) -> None:
        assert verdict("C08", self.case(**change)) == "refuted"

    def test_not_measurable_without_counters(self) -> None:
        assert verdict("C08", {"countable": False, "by_devices": {}}) == "not measurable here"


class TestC11:
    def case(self, growth: float, devices: int = 8, bent: bool = False) -> dict[str, Any]:
        def way(slope: float) -> dict[str, list[float]]:
            return {str(count): around(0.01 + slope * (count - 1)) for count in range(2, 9)}

        sends = way(0.01)
        if bent:
            sends = {str(count): around(0.05 if count == 2 else 0.01) for count in range(2, 9)}
        ways = {"send loop": sends, "broadcast": way(0.01 * growth), "all-reduce": way(0.001)}
        leaving = {way: {str(count): float(count - 1) for count in range(2, 9)} for way in ways}
        return {"processes": 8, "devices": devices, "device": "cpu", "sizes": {"5": ways}, "leaving": leaving}

    def test_confirmed_even_where_processes_share_cores(self) -> None:
        assert verdict("C11", self.case(0.3)) == "confirmed"
        assert verdict("C11", self.case(0.3, devices=2)) == "confirmed"

    def test_refuted_only_with_a_core_each(self) -> None:
        assert verdict("C11", self.case(0.9)) == "refuted"
        found = judge("C11", self.case(0.9, devices=2))
        assert found.verdict == "not measurable here"
        assert "needs 8 cores" in found.reason

    def test_inconclusive(self) -> None:
        assert verdict("C11", self.case(0.5)) == "inconclusive"
        assert verdict("C11", self.case(0.3, bent=True)) == "inconclusive"
