"""The charts: which plots are drawn, their lines and names, and their tables of numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_lab.report.charts.claims import claim_plots
from ddp_lab.report.charts.layouts import layout_plots, styles
from ddp_lab.report.charts.learning import learning_plots
from ddp_lab.report.reading.claims import Claim
from ddp_lab.report.reading.families import find_families
from ddp_lab.report.reading.runs import read_runs
from tests.lab.report.files import claim, ddp, dp, single, write_run


def test_without_a_single_run_there_is_no_speed_up(tmp_path: Path) -> None:
    write_run(tmp_path, ddp(2))
    write_run(tmp_path, dp(2))
    family = find_families(read_runs(tmp_path).runs)[0]
    names = [plot.title for plot in layout_plots(family, styles([family]))]
    assert names == ["Throughput", "Memory", "Processor use", "Where a step's time goes"]


def test_a_measured_split_is_shown_part_by_part(tmp_path: Path) -> None:
    split = {"data": 0.001, "forward": 0.01, "backward": 0.02, "exposed_communication": 0.005, "optimizer": 0.002}
    write_run(tmp_path, single(), result={"time_split": split | {"exposed_communication": 0.0}})
    write_run(tmp_path, ddp(2), result={"time_split": split})
    family = find_families(read_runs(tmp_path).runs)[0]
    plot = layout_plots(family, styles([family]))[-1]
    assert [entry.get_text() for entry in plot.figure.legends[0].get_texts()] == [
        *("waiting for data", "forward", "backward", "exposed communication", "optimizer"),
    ]
    assert [cell.order for cell in plot.table.rows[1][1:]] == pytest.approx([1, 10, 20, 5, 2])
    assert plot.table.rows[0][4].order is None


def test_lines_are_one_seed_and_bands_reach_over_all(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        write_run(tmp_path, single(), seed=seed)
    write_run(tmp_path, ddp(2), seed=1)
    family = find_families(read_runs(tmp_path).runs)[0]
    assert family.common_seed == 1
    plots = {plot.name: plot for plot in learning_plots(family, styles([family]))}
    assert set(plots) == {
        f"digits-{name}-over-{place}"
        for name in ("train-loss", "test-loss", "test-accuracy")
        for place in ("steps", "time")
    }
    first = plots["digits-test-loss-over-steps"].table.rows[0]
    assert [cell.order for cell in first[3:]] == pytest.approx([1 / 6, 1 / 7, 1 / 5])


def test_categories_stand_apart_and_sweeps_are_joined() -> None:
    def joined(values: list[str]) -> list[bool]:
        axis = {"name": "way", "values": values}
        lines = [{"name": name, "values": [1, None, 3]} for name in ("a", "b")]
        series = [{"title": "t", "x": axis, "y": {"name": "ms"}, "lines": lines}]
        (plot,) = claim_plots(Claim.model_validate(claim(series=series)))
        assert [[cell.text for cell in row[:3]] for row in plot.table.rows] == [
            ["a", values[0], "1.00"],
            ["a", values[2], "3.00"],
            ["b", values[0], "1.00"],
            ["b", values[2], "3.00"],
        ]
        return [line.get_linestyle() != "None" for line in plot.figure.axes[0].lines]

    assert joined(["before", "during", "after"]) == [False, False]
    assert joined(["1", "5", "25"]) == [True, True]
