"""The projection: its formulas, checked by hand; its fit, on made-up points; its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_lab.projection import main
from ddp_lab.projection.command import build_parser
from ddp_lab.projection.costs import Link, busy_ranks, ring_seconds, steps_and_shares
from ddp_lab.projection.fit import Fitted, Point, check, fit, split
from ddp_lab.projection.hardware import GPUS, LINKS, NETWORKS
from ddp_lab.projection.measure import hidden_share, measure_collectives, measure_steps
from ddp_lab.projection.step import FIRST_BUCKET, buckets, step

FAST, SLOW = Link("fast", 1e-6, 100e9), Link("slow", 10e-6, 10e9)
SIZES = tuple(2**exponent for exponent in range(12, 25))


def made_up(ranks: tuple[int, ...] = (2, 3, 4), noise: float = 0.0) -> list[Point]:
    truth = Fitted("all_reduce", 2, 100e-6, 0.2e-9, 0.8e-9, 2**20)
    return [
        Point("all_reduce", count, size, truth.seconds(count, size) * (1 + noise * (-1) ** index))
        for count in ranks
        for index, size in enumerate(SIZES)
    ]


class TestCosts:
    def test_a_ring_sends_2_p_minus_1_messages_and_the_tensor_nearly_twice(self) -> None:
        assert steps_and_shares("all_reduce", 4) == (6.0, 1.5)
        assert ring_seconds(1e9, 4, 8, FAST, SLOW) == pytest.approx(6e-6 + 1.5e9 / 100e9)

    def test_a_broadcast_goes_by_levels_and_sends_one_by_one(self) -> None:
        assert steps_and_shares("broadcast", 8) == (3.0, 3.0)
        assert steps_and_shares("broadcast", 5) == (3.0, 3.0)
        assert steps_and_shares("send", 5) == (4.0, 4.0)

    def test_ranks_busy_at_once(self) -> None:
        assert busy_ranks("all_reduce", 4) == 4
        assert busy_ranks("send", 4) == 2
        assert (busy_ranks("broadcast", 2), busy_ranks("broadcast", 4)) == (2, 3)

    def test_between_nodes_the_slower_link_decides(self) -> None:
        seconds = ring_seconds(1e9, 16, 8, FAST, SLOW)
        assert seconds == pytest.approx(28 * 1e-6 + 2 * 10e-6 + 2 * 15 / 16 * 1e9 / 10e9)

    def test_one_rank_has_nothing_to_say(self) -> None:
        assert ring_seconds(1e9, 1, 8, FAST, SLOW) == 0
        assert steps_and_shares("send", 1) == (0, 0)


class TestFit:
    def test_finds_the_constants_that_made_the_points(self) -> None:
        seen, held = split(made_up(), (3,), SIZES[::3])
        model = fit(seen, 2)
        assert model.latency == pytest.approx(100e-6, rel=1e-3)
        assert model.per_byte_beyond == pytest.approx(0.8e-9, rel=1e-3)
        assert check(model, held).largest < 1e-6

    def test_what_is_held_out_is_not_fitted(self) -> None:
        seen, held = split(made_up(), (3,), SIZES[::3])
        assert not {point.ranks for point in seen} & {3}
        assert not {point.size for point in seen} & set(SIZES[::3])
        assert len(seen) + len(held) == len(made_up())

    def test_constants_are_never_negative(self) -> None:
        falling = [Point("broadcast", 2, size, 1.0 / (index + 1)) for index, size in enumerate(SIZES)]
        model = fit(falling, 2)
        assert min(model.latency, model.per_byte, model.per_byte_beyond) >= 0

    def test_a_check_can_fail(self) -> None:
        model = fit(made_up(), 2)
        assert check(model, made_up(noise=0.05)).passed
        assert not check(model, made_up(noise=0.3)).passed

    def test_no_points(self) -> None:
        with pytest.raises(ValueError, match="no points"):
            fit([], 2)
        with pytest.raises(ValueError, match="no points"):
            check(fit(made_up(), 2), [])


class TestStep:
    def test_buckets_hold_all_gradients_the_first_is_small(self) -> None:
        sizes = buckets(100e6)
        assert sizes[0] == FIRST_BUCKET
        assert sum(sizes) == pytest.approx(100e6)
        assert max(sizes) == 25 * 2**20
        # As DDP does it where bucket_cap_mb is given.
        assert buckets(100e6, 40e6) == [40e6, 40e6, 20e6]

    def test_free_communication_costs_nothing(self) -> None:
        assert step(0.1, 100e6, lambda size: 0.0, 8).efficiency == pytest.approx(1)

    def test_of_communication_only_the_last_bucket_shows_when_the_link_is_fast(self) -> None:
        found = step(0.1, 100e6, lambda size: size / 100e9, 8)
        assert 0 < found.exposed < found.communication
        assert found.exposed == pytest.approx(buckets(100e6)[-1] / 100e9)

    def test_a_slow_link_cannot_be_hidden(self) -> None:
        found = step(0.1, 100e6, lambda size: size / 0.1e9, 8)
        assert found.communication == pytest.approx(1.0)
        assert found.exposed > 0.9

    def test_the_wait_for_the_slowest_rank_is_a_term_of_its_own(self) -> None:
        found = step(0.1, 1e6, lambda size: 0.0, 8, lateness=0.25)
        assert (found.slowest, found.exposed) == (pytest.approx(0.025), 0)
        assert found.efficiency == pytest.approx(0.8)

    def test_one_rank_is_the_measure(self) -> None:
        assert step(0.1, 1e8, lambda size: 1.0, 1).efficiency == 1


class TestSources:
    def test_every_constant_has_one(self) -> None:
        sources = [gpu.source for gpu in GPUS.values()] + [link.source for link in (LINKS | NETWORKS).values()]
        assert all(len(source) > 20 for source in sources)


class TestCommand:
    def test_projects_without_measuring(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--skip-measuring", "--ranks", "1,8,4096", "--output", str(tmp_path)]) == 0
        content = json.loads((tmp_path / "projection" / "projection.json").read_text())
        assert [row["ranks"] for row in content["projection"]] == [1, 8, 4096]
        assert content["projection"][0]["ring"]["efficiency"] == 1
        assert content["projection"][2]["tree"]["efficiency"] > content["projection"][2]["ring"]["efficiency"]
        assert content["projection"][2]["nccl"] == content["projection"][2]["tree"]
        assert "here" not in content
        said = capsys.readouterr().out
        assert "fitted here: " in said
        assert "published, never checked here: nvlink-a100: 12 links" in said

    def test_a_row_that_a_published_run_contradicts_says_so_itself(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["--skip-measuring", "--ranks", "8,4096", "--output", str(tmp_path)]) == 0
        said = capsys.readouterr().out.splitlines()
        eight = next(line for line in said if line.startswith("     8 "))
        assert "99.8 %" in eight
        assert "84.1 % (DGX A100, mixed: the bound is +18.6 %)" in eight
        assert "?" in next(line for line in said if line.startswith("  4096 "))

    def test_ones_own_model_has_no_forecast(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["--skip-measuring", "--gradient-mb", "400", "--ranks", "8", "--output", str(tmp_path)]
        assert main(words) == 0
        said = capsys.readouterr().out
        assert "no forecast: no published run" in said
        assert "given: a100-amp: gradient bytes as given" in said
        row = json.loads((tmp_path / "projection" / "projection.json").read_text())["projection"][0]
        assert row["forecast"] is None
        assert row["published"] is None

    def test_stragglers_are_not_counted_twice(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--skip-measuring", "--jitter", "2", "--ranks", "8", "--output", str(tmp_path)]) == 0
        assert "contains its stragglers" in capsys.readouterr().out

    def test_takes_ones_own_numbers(self, tmp_path: Path) -> None:
        own = [
            "--samples-per-second",
            "50",
            "--batch",
            "16",
            "--gradient-mb",
            "4000",
            "--link",
            "300",
            "--network",
            "50",
        ]
        assert main(["--skip-measuring", *own, "--output", str(tmp_path)]) == 0
        content = json.loads((tmp_path / "projection" / "projection.json").read_text())
        assert content["gpu"]["gradient_bytes"] == 4e9
        assert content["network"]["bandwidth"] == 50e9

    @pytest.mark.parametrize("words", [["--link", "string"], ["--network", "-3"], ["--link", "inf"]])
    def test_unknown_links_are_refused(
        self, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["--skip-measuring", *(f"{words[0]}={words[1]}",), "--output", str(tmp_path)]) == 2
        assert "number of GB/s" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("option", "value", "why"),
        [
            ("--batch", "0.5", "0.5 is not a whole number from 1 to 1000000000"),
            ("--batch", "0", "0 is not a whole number from 1 to 1000000000"),
            ("--jitter", "-1", "-1 is not a number from 0 to 1e+09"),
            ("--jitter", "nan", "nan is not a number from 0 to 1e+09"),
            ("--samples-per-second", "inf", "inf is not a number above 0"),
            ("--gradient-mb", "many", "many is not a number above 0"),
            ("--ranks", "1,x", "x is not a whole number from 1 to 1000000000"),
            ("--ranks", "9" * 400, "is not a whole number from 1 to 1000000000"),
            ("--bucket-mb", "0", "0 is not a number above 0"),
            ("--gpu", "h900", "invalid choice"),
            ("--rounds", "1.5", "1.5 is not a whole number from 1 to 1000000000"),
        ],
    )
    def test_numbers_are_checked(self, option: str, value: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--skip-measuring", f"{option}={value}"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"argument {option}: " in line
        assert why in line

    @pytest.mark.parametrize("words", [["--gpus"], ["--no-such"], ["--batch"], ["--jitter", "1", "--steps-of", "run"]])
    def test_words_that_it_does_not_know_are_one_line(
        self, words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["--skip-measuring", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("(see `ddp project --help`)")

    def test_more_buckets_than_anybody_has_are_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--skip-measuring", "--gradient-mb", "1e9"]) == 2
        assert "--bucket-mb" in capsys.readouterr().err

    def test_an_output_that_cannot_be_written(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "projection").write_text("in the way")
        assert main(["--skip-measuring", "--output", str(tmp_path)]) == 4
        assert "--output" in capsys.readouterr().err

    def test_help_says_how(self) -> None:
        said = build_parser().format_help()
        assert "not seen" in said
        assert "ddp project --gpu" in said


class TestOverlap:
    def test_share(self) -> None:
        assert hidden_share({"alone": 1.0, "ddp": 1.25, "afterwards": 2.0}) == pytest.approx(0.75)
        assert hidden_share({"alone": 1.0, "ddp": 2.5, "afterwards": 2.0}) == 0
        assert hidden_share({"alone": 1.0, "ddp": 1.0, "afterwards": 1.0}) is None


@pytest.mark.slow
def test_steps_are_really_timed() -> None:
    steps, own = measure_steps(2, 3)
    assert set(steps) == {"alone", "ddp", "afterwards"}
    assert [len(rank) for rank in own] == [3, 3]
    assert min(steps.values()) > 0


def test_collectives_are_really_timed() -> None:
    points = measure_collectives((2,), (4096, 2**20), 3, lambda text: None)
    assert {(point.collective, point.size) for point in points} == {
        (name, size) for name in ("all_reduce", "broadcast", "send") for size in (4096, 2**20)
    }
    assert all(point.seconds > 0 for point in points)
