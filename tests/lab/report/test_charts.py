"""The charts: which plots are drawn, their lines and names, and their tables of numbers."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from ddp_lab.report.charts.claims import claim_plots
from ddp_lab.report.charts.learning import learning_plots, styles
from ddp_lab.report.charts.plot import Plot
from ddp_lab.report.reading.claims import Claim
from ddp_lab.report.reading.families import find_families
from ddp_lab.report.reading.runs import read_runs
from tests.lab.report.files import claim, ddp, single, write_run


def test_lines_are_one_seed_and_bands_reach_over_all(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        write_run(tmp_path, single(), seed=seed)
    write_run(tmp_path, ddp(2), seed=1)
    family = find_families(read_runs(tmp_path).runs)[0]
    assert family.common_seed == 1
    plots = {plot.name: plot for plot in learning_plots(family, styles([family]))}
    assert set(plots) == {f"digits-{name}" for name in ("train-loss", "test-loss", "test-accuracy")}
    first = plots["digits-test-loss"].table.rows[0]
    assert [cell.order for cell in first[2:]] == pytest.approx([1 / 6, 1 / 7, 1 / 5])


def drawn(values: list[float] | list[str], *lines: str, **axis: Any) -> Plot:
    """The plot of a claim with these values on the x axis, and a point of each line at each but the second."""
    points = [None if place == 1 else place + 1 for place in range(len(values))]
    series = {
        "title": "t",
        "x": {"name": "way", "values": values},
        "y": {"name": "ms"} | axis,
        "lines": [{"name": name, "values": points} for name in lines or ("a", "b")],
    }
    (plot,) = claim_plots(Claim.model_validate(claim(series=[series])))
    return plot


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """The texts of a chart that lie on one another, in pairs."""
    FigureCanvasAgg(figure).draw()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    return [(one, other) for (one, here), (other, there) in combinations(boxes, 2) if here.overlaps(there)]


def test_words_stand_in_rows_and_written_numbers_are_joined() -> None:
    def joined(values: list[str]) -> list[bool]:
        plot = drawn(values)
        assert [[cell.text for cell in row[:3]] for row in plot.table.rows] == [
            ["a", values[0], "1.00"],
            ["a", values[2], "3.00"],
            ["b", values[0], "1.00"],
            ["b", values[2], "3.00"],
        ]
        return [line.get_linestyle() != "None" for line in plot.figure.axes[0].lines]

    assert joined(["before", "during", "after"]) == [False, False]
    assert joined(["1", "5", "25"]) == [True, True]
    axes = drawn(["before", "during", "after"]).figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["before", "during", "after"]
    assert [list(line.get_xdata()) for line in axes.lines] == [[1, 3], [1, 3]]
    assert axes.get_title("left") == "ms, by way"


WAYS = ["one by one", "in buckets of 25 MB", "one bucket for everything", "DistributedDataParallel", "not at all"]


@pytest.mark.parametrize(
    "values",
    [WAYS, [1e3, 1e6, 2e7, 1e8], [1_048_576.0, 3_000_000.0], ["0.001", "0.01", "0.1", "1", "10", "100"]],
    ids=["words", "millions", "few millions", "written numbers"],
)
def test_no_label_lies_on_another(values: list[float] | list[str]) -> None:
    assert overlaps(drawn(values, "gloo over loopback, two processes", "nccl").figure) == []


def test_the_overlap_of_labels_would_be_seen() -> None:
    figure = drawn(["1", "5"]).figure
    figure.axes[0].set_xticks([0, 0.1], ["long words", "that have no room"])
    assert ("long words", "that have no room") in overlaps(figure)


def test_a_logarithmic_axis_is_labelled_with_numbers(tmp_path: Path) -> None:
    path = write_run(tmp_path, single())
    losses = [{"kind": "step", "time": 1000.0 + step, "step": step, "loss": 10.0 ** (2 - step)} for step in range(6)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in losses))
    (family,) = find_families(read_runs(tmp_path).runs)
    plot = next(plot for plot in learning_plots(family, {"single-cpu": 0}) if plot.name.endswith("loss"))
    assert "The axis is logarithmic." in plot.caption
    assert "mathdefault" not in plot.svg
    assert ">0.01</text>" in plot.svg.replace("\n", "")
