"""The sentence that the report opens with for each experiment, and figures that have no digit more than their noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_core.config.layout import Layout
from ddp_lab.report.contents import build_report
from ddp_lab.report.page import render
from ddp_lab.report.reading.families import find_families
from ddp_lab.report.reading.runs import read_runs
from ddp_lab.report.sections.answers import answer
from ddp_lab.report.values import Spread, measured, measured_range
from tests.lab.report.files import ddp, dp, single, write_run


def said(output: Path) -> str:
    (family,) = find_families(read_runs(output).runs)
    return answer(family).replace("\N{NO-BREAK SPACE}", " ")


def times(output: Path, layout: Layout, *speeds: float, **result: Any) -> None:
    for speed in speeds:
        write_run(output, layout, steps=0, speed=speed, result={"test_accuracy": None, "test_loss": None, **result})


def test_the_fastest_layout_is_named_with_its_gain_and_the_weights(tmp_path: Path) -> None:
    times(tmp_path, single(), 1000.0)
    assert said(tmp_path) == "run as single only."
    times(tmp_path, ddp(2), 1991.0)
    times(tmp_path, dp(2), 700.0)
    assert said(tmp_path) == "ddp × 2 is fastest here: 2.0 times single, same weights."  # noqa: RUF001


def test_a_single_process_may_be_the_fastest(tmp_path: Path) -> None:
    times(tmp_path, single(), 1000.0)
    times(tmp_path, ddp(2), 400.0)
    assert said(tmp_path) == "single is fastest here: ddp × 2 takes 2.5 times as long, same weights."  # noqa: RUF001


def test_what_the_noise_hides_is_not_said(tmp_path: Path) -> None:
    times(tmp_path / "one run each", single(), 1000.0)
    times(tmp_path / "one run each", ddp(2), 1080.0)
    assert "ddp × 2 and single are about as fast here" in said(tmp_path / "one run each")  # noqa: RUF001
    times(tmp_path / "overlapping", single(), 1000.0, 1400.0)
    times(tmp_path / "overlapping", ddp(2), 1300.0, 1900.0)
    assert "ddp × 2 and single are about as fast here" in said(tmp_path / "overlapping")  # noqa: RUF001
    times(tmp_path / "apart", single(), 1000.0, 1002.0)
    times(tmp_path / "apart", ddp(2), 1988.0, 1994.0)
    assert "ddp × 2 is fastest here: 1.99 times single" in said(tmp_path / "apart")  # noqa: RUF001
    times(tmp_path / "apart", ddp(4), 5000.0, other_cores_busy=1.0)
    assert said(tmp_path / "apart").endswith("(timed on a busy machine).")


def test_other_weights_are_said(tmp_path: Path) -> None:
    times(tmp_path, single(), 1000.0)
    write_run(
        tmp_path, ddp(2), steps=0, speed=2000.0, digest="b" * 64, result={"test_accuracy": None, "test_loss": None}
    )
    assert said(tmp_path).endswith("2.0 times single, but digests differ.")


def test_the_quality_is_that_of_accuracy_or_of_the_experiments_own_figure(tmp_path: Path) -> None:
    write_run(tmp_path / "a", single(), steps=0, result={"test_accuracy": 0.98611})
    assert said(tmp_path / "a") == "run as single only; accuracy 98.61 %."
    write_run(tmp_path / "c", single(), steps=0, result={"test_accuracy": None, "test_loss": 0.5})
    assert said(tmp_path / "c") == "run as single only; loss 0.5000."
    for seed, value in enumerate((2.8112, 3.0208)):
        result = {"test_accuracy": None, "test_perplexity": value}
        write_run(tmp_path / "b", single(), steps=0, seed=seed, result=result)
    assert said(tmp_path / "b") == "run as single only; perplexity 2.811 to 3.021 over 2 seeds."


def test_the_tables_show_the_experiments_own_figures(tmp_path: Path) -> None:
    own = {"test_accuracy": None, "test_mean_f1": 0.51234, "test_confusion": [[1, 2]]}
    for layout in (single(), ddp(2)):
        write_run(tmp_path, layout, steps=0, result=own)
    page = render(build_report(tmp_path))
    assert ">mean f1</th>" in page
    assert "accuracy</th>" not in page
    assert "<small>mean f1</small>" in page
    assert "loss 0.03000, mean f1 0.5123" in page


@pytest.mark.parametrize(
    ("values", "expected", "ends"),
    [
        ((1991.0,), "2,000", None),
        ((1991.0, 1991.0), "2,000", "2,000 to 2,000"),
        ((1378.0, 1390.0, 1404.0), "1,390", "1,378 to 1,404"),
        ((458.0, 931.0, 1404.0), "900", "460 to 1,400"),
        ((0.2183,), "0.22", None),
        ((1.981, 1.987, 1.994), "1.99", "1.981 to 1.994"),
        ((0.0,), "0.0", None),
        ((99.6,), "100", None),
        ((0.5, 3.0, 40.0), "3", "0 to 40"),
    ],
)
def test_no_digit_that_noise_has_eaten(values: tuple[float, ...], expected: str, ends: str | None) -> None:
    spread = Spread.of(values)
    assert spread is not None
    assert measured(spread) == expected
    assert ends is None or measured_range(spread) == ends
