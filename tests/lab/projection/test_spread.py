"""The wait for the slowest rank: expected maxima by hand, and steps read from a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ddp_core.base.errors import UserError
from ddp_core.config.layout import Layout
from ddp_lab.projection import main
from ddp_lab.projection.spread import expected_maximum, measured, normal, steps_of
from tests.support.commands import ddp
from tests.support.records import EXPERIMENT, a_record


def run(folder: Path, steps: int = 41, ranks: int = 1, every: int = 1, seconds: tuple[float, ...] = (0.1, 0.3)) -> Path:
    """A run of 20 steps per epoch whose steps took these seconds in turns; epochs end with half the samples."""
    place = folder / "run"
    place.mkdir()
    layout = Layout(kind="ddp" if ranks > 1 else "single", nproc_per_node=ranks)
    record = a_record(EXPERIMENT.model_copy(update={"global_batch_size": 60}), layout)
    (place / "run.json").write_text(json.dumps(record))
    lines: list[dict[str, Any]] = []
    for step in range(every, steps + 1, every):
        samples = 30 if step % 20 == 0 else 60
        speed = samples / seconds[step % len(seconds)] if step > 1 else 1.0
        lines.append({"kind": "step", "step": step, "epoch": (step - 1) // 20, "samples_per_second": speed})
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


class TestMaximum:
    def test_of_one_rank_is_the_mean(self) -> None:
        assert expected_maximum([1.0, 2.0, 6.0], 1) == pytest.approx(3.0)

    def test_of_two_ranks_by_hand(self) -> None:
        # Of nine pairs drawn from 1, 2, 6, one has the maximum 1, three have 2, five have 6.
        assert expected_maximum([6.0, 1.0, 2.0], 2) == pytest.approx((1 + 3 * 2 + 5 * 6) / 9)

    def test_many_ranks_meet_the_slowest_step(self) -> None:
        assert expected_maximum([1.0, 2.0, 6.0], 4096) == pytest.approx(6.0)

    def test_no_steps(self) -> None:
        with pytest.raises(ValueError, match="no steps"):
            expected_maximum([], 2)

    def test_lateness_is_a_share_of_the_mean(self) -> None:
        assert measured([1.0, 3.0])(2) == pytest.approx(2.5 / 2 - 1)
        assert measured([2.0, 2.0])(64) == pytest.approx(0)

    def test_one_late_step_in_a_hundred(self) -> None:
        steps = [1.0] * 99 + [2.0]
        assert expected_maximum(steps, 1) == pytest.approx(1.01)
        assert expected_maximum(steps, 64) == pytest.approx(1.47, abs=0.005)

    def test_of_normal_times(self) -> None:
        # The maximum of 2 is 1/sqrt(pi), of 3 is 1.5/sqrt(pi); of 16 see David and Nagaraja, table of normal maxima.
        assert normal(0.02)(1) == pytest.approx(0, abs=1e-9)
        assert normal(0.02)(2) == pytest.approx(0.02 / math.sqrt(math.pi), rel=1e-3)
        assert normal(0.02)(3) == pytest.approx(0.03 / math.sqrt(math.pi), rel=1e-3)
        assert normal(0.02)(16) == pytest.approx(0.02 * 1.76599, rel=1e-3)
        assert normal(0.02)(4096) == pytest.approx(0.02 * 3.6, rel=0.01)
        assert normal(0.0)(1024) == 0


class TestStepsOf:
    def test_first_steps_and_last_ones_of_an_epoch_are_left_out(self, tmp_path: Path) -> None:
        found = steps_of(run(tmp_path))
        assert {round(seconds, 9) for seconds in found} == {0.1, 0.3}
        assert len(found) == 18 + 19  # of steps 2 … 40, not 20 and 40; step 41 has no successor

    def test_ranks_that_wait_for_each_other_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="2 ranks, which wait"):
            steps_of(run(tmp_path, ranks=2))

    def test_means_over_several_steps_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="--log-every 1"):
            steps_of(run(tmp_path, steps=400, every=10))

    def test_the_table_has_the_wait_for_the_slowest(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["--skip-measuring", "--ranks", "1,4096", "--output", str(tmp_path)]
        assert main([*words, "--steps-of", str(run(tmp_path))]) == 0
        assert "slowest: ms" in capsys.readouterr().out
        one, many = json.loads((tmp_path / "projection" / "projection.json").read_text())["projection"]
        assert (one["ring"]["slowest"], one["ring"]["efficiency"]) == (0, 1)
        # The slowest of many ranks takes 0.3 s where the mean is about 0.2 s.
        assert 0.4 < many["ring"]["slowest"] / many["ring"]["compute"] < 0.6
        assert many["ring"]["slowest"] == many["exact"]["slowest"]

    @pytest.mark.slow
    def test_a_real_run_is_read(self, tmp_path: Path) -> None:
        words = ["--layout", "single", "--device", "cpu", "--log-every", "1", "--set", "max_steps=30"]
        assert ddp("train", "digits", *words, env={"DDP_OUTPUT": str(tmp_path)}).code == 0
        (place,) = (tmp_path / "digits").iterdir()
        assert main(["--skip-measuring", "--steps-of", str(place), "--output", str(tmp_path)]) == 0

    def test_what_is_no_run_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--skip-measuring", "--steps-of", str(tmp_path), "--output", str(tmp_path)]) == 2
        assert "not a run directory" in capsys.readouterr().err
