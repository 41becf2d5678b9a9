"""Ranks that come and go: the trace that a seed brings, what it has cost by the metrics, and a short drill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddp_core.base.errors import UserError
from ddp_lab.chaos.__main__ import main
from ddp_lab.chaos.drill import SpotSpec, parse
from ddp_lab.chaos.spot import changes, pauses
from tests.support.commands import command


@pytest.mark.parametrize("seed", range(20))
def test_ranks_leave_and_come_between_the_bounds(seed: int) -> None:
    spot = SpotSpec(seconds=100, every=(2, 6), least=1)
    found = changes(spot, 6, seed)
    assert found == changes(spot, 6, seed)
    assert 100 / 6 - 1 <= len(found) <= 50
    here, at = set(range(6)), 0.0
    for change in found:
        assert 2 <= round(change.at_seconds - at, 3) <= 6.001
        assert set(change.leaving) <= here
        assert not set(change.coming) & here
        here, at = here - set(change.leaving) | set(change.coming), change.at_seconds
        assert 1 <= len(here) == change.ranks <= 6
        assert change.leaving or change.coming
    assert {change.ranks for change in found} >= {1, 6} or len(found) < 20


def test_a_change_costs_what_lies_between_two_steps_less_a_usual_one() -> None:
    def step(time: float, **more: Any) -> dict[str, Any]:
        return {"kind": "step", "time": time, "data_wait": 0.0, **more}

    told = {"kind": "step", "time": 3.2}
    records = [step(1.0), step(1.1), {"kind": "resume", "time": 1.5}, step(1.7), step(1.8), {"kind": "checkpoint"}]
    records += [step(1.9), {"kind": "resume", "time": 2.5}, {"kind": "resume", "time": 3.1}, told, step(3.4)]
    assert pauses(records) == pytest.approx([0.5, 1.4])
    assert pauses([step(1.0), step(1.1)]) == pauses([]) == []


@pytest.mark.parametrize(
    ("drill", "expected"),
    [
        ({"spot": {}, "faults": [{"fault": "kill", "at_step": 1}], "nodes": 1, "nproc_per_node": 2}, "one of them"),
        ({}, "give faults or spot"),
        ({"spot": {}, "nproc_per_node": 2}, "spot is for nodes: 1"),
        ({"spot": {"least": 2}, "nodes": 1, "nproc_per_node": 2}, "above its `least`"),
        ({"spot": {"every": [3, 2]}, "nodes": 1, "nproc_per_node": 2}, "low, high"),
    ],
)
def test_mistakes_in_a_drill_of_ranks_that_come_and_go_are_named(drill: dict[str, object], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        parse(drill)


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--nodes", "2"], "is for one node"), (["--recovery", "restart"], "is of live recovery alone")],
)
def test_where_ranks_cannot_come_and_go_it_is_said(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--drill", "spot", "--output", str(tmp_path), *words]) == 2
    assert expected in capsys.readouterr().err


def test_each_rank_can_have_a_node_of_its_own() -> None:
    drill = parse({"spot": {"least": 2}, "nodes": 1, "nproc_per_node": 4}).with_ranks_as_nodes()
    assert (drill.nodes, drill.nproc_per_node, drill.most_at_once) == (4, 1, 4)
    assert "--recovery live --nnodes 1:4" in " ".join(drill.train_options())


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "ranks"), [(1, 3), (3, 1)])
def test_ranks_come_and_go_and_the_weights_are_the_undisturbed_ones(tmp_path: Path, nodes: int, ranks: int) -> None:
    file = tmp_path / "short.yaml"
    file.write_text(
        f"settings: [epochs=8]\nnodes: {nodes}\nnproc_per_node: {ranks}\ncheckpoint_every: 100\n"
        "spot: {seconds: 8, every: [0.5, 2], share: 0}\n"
    )
    words = ["--drill", file, "--output", tmp_path / "outputs", "--seed", "1"]
    ended = command(*words, program=("-m", "ddp_lab.chaos"))
    assert ended.code == 0, ended.output + ended.errors
    assert "of the time was spent training" in ended.output
    (report_file,) = (tmp_path / "outputs").glob("*/*/drill.json")
    report = json.loads(report_file.read_text())
    assert (report["identical"], report["ledger_whole"], report["exit_code"]) == (True, True, 0)
    assert report["spot"]["changes"] == len(changes(SpotSpec(seconds=8, every=(0.5, 2)), 3, 1))
    assert 0 < report["spot"]["trained_share"] < 1
    assert (report["remarks"], report["left_behind"]) == ([], [])
    record = json.loads(report_file.with_name("run.json").read_text())
    assert all(attempt["restart_count"] == 0 for attempt in record["attempts"]), "a whole state has always lived"
