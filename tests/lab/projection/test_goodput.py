"""What failures leave of the time: the formulas beside a simulation, beside the drill's own trace, and as a table."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from statistics import fmean

import pytest

from ddp_core.base.errors import UserError
from ddp_lab.chaos.drill import SpotSpec
from ddp_lab.chaos.spot import changes
from ddp_lab.projection.command import main
from ddp_lab.projection.goodput import (
    FailureCosts,
    goodput,
    goodput_lines,
    goodput_of_live,
    goodput_of_restart,
    measured_costs,
)

COSTS = FailureCosts(restart=40.0, live=15.0, checkpoint_every=300.0, save=6.0)


def simulated(per_hour: float, costs: FailureCosts, is_live: bool, seed: int, intervals: int = 4000) -> float:
    """The share of new steps of a run that is played, second by second as failures strike."""
    dice, between = random.Random(seed), 3600.0 / per_hour
    clock, trained, next_failure = 0.0, 0.0, dice.expovariate(1 / between)

    def survives(seconds: float) -> bool:
        """Let so many seconds pass, or the time to the next failure; whether there was none."""
        nonlocal clock, next_failure
        if clock + seconds < next_failure:
            clock += seconds
            return True
        clock = next_failure
        next_failure = clock + dice.expovariate(1 / between)
        return False

    for _ in range(intervals):
        left = costs.checkpoint_every + costs.save
        while left > 0:
            begun = clock
            if survives(left):
                break
            if is_live:
                left -= clock - begun
            cost = costs.live if is_live else costs.restart
            assert cost is not None
            while not survives(cost):
                pass
        trained += costs.checkpoint_every
    return trained / clock


@pytest.mark.parametrize("per_hour", [1, 10, 30])
@pytest.mark.parametrize("is_live", [False, True], ids=["restart", "live"])
def test_the_formulas_say_what_a_played_run_shows(per_hour: float, is_live: bool) -> None:
    expected = (goodput_of_live if is_live else goodput_of_restart)(per_hour, COSTS)
    assert expected is not None
    played = fmean(simulated(per_hour, COSTS, is_live, seed) for seed in range(5))
    assert played == pytest.approx(expected, rel=0.02)


def test_without_failures_only_saves_cost() -> None:
    assert goodput_of_live(0, COSTS) == goodput_of_restart(0, COSTS) == pytest.approx(300 / 306)
    assert goodput_of_restart(1e6, COSTS) == 0.0
    assert goodput_of_live(1e-6, COSTS) == pytest.approx(300 / 306)


@pytest.mark.parametrize("pause", [0.2, 0.5, 1.0])
def test_the_trace_of_the_spot_drill_costs_what_the_formula_says(pause: float) -> None:
    """The drill draws the time between two changes evenly from two to six seconds, so this is no Poisson process."""
    spot = SpotSpec(seconds=3000)
    found = changes(spot, 6, seed=7)
    clock = 0.0
    for change in found:
        clock = max(clock, change.at_seconds) + pause  # a change waits for the one before
    share, per_hour = 1 - pause * len(found) / max(clock, spot.seconds), len(found) * 3600 / spot.seconds
    costs = FailureCosts(None, pause, checkpoint_every=1.0, save=0.0)
    assert goodput_of_live(per_hour, costs) == pytest.approx(share, abs=0.03)


def test_costs_come_from_the_record_and_are_said_where_they_are_missing(tmp_path: Path) -> None:
    file = tmp_path / "recovery.json"
    faults = {"worker killed": {"median": 0.7}, "worker killed, live": {"median": 0.25}}
    file.write_text(json.dumps({"results": {"faults": faults}}))
    assert measured_costs(file) == (0.7, None)
    lines = goodput_lines(goodput(FailureCosts(*measured_costs(file), 600, 0), [1.0]))
    assert any("(not measured" in line for line in lines)
    assert lines[-1].split() == ["1", f"{100 * 600 / _interval(600, 0.7):.2f}", "%", "-"]
    faults["worker joins, live"] = {"median": 0.2}
    file.write_text(json.dumps({"results": {"faults": faults}}))
    assert measured_costs(file) == (0.7, pytest.approx(0.45))
    file.write_text("{}")
    with pytest.raises(UserError, match="no record of benchmarks"):
        measured_costs(file)


def _interval(every: float, restart: float) -> float:
    return 3600 * math.exp(restart / 3600) * math.expm1(every / 3600)


def test_the_command_prints_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--skip-measuring", "--failures", "0,60", "--restart-seconds", "30", "--live-seconds", "1"]
    assert main([*words, "--checkpoint-seconds", "60", "--output", str(tmp_path)]) == 0
    assert "failures per hour" in capsys.readouterr().out
    rows = json.loads((tmp_path / "projection" / "projection.json").read_text())["goodput"]["rows"]
    assert [row["per_hour"] for row in rows] == [0, 60]
    assert rows[0]["live"] == rows[0]["restart"] == 1
    assert rows[1]["live"] == pytest.approx(math.exp(-1 / 60))
    assert rows[1]["restart"] == pytest.approx(60 / (60 * math.exp(0.5) * math.expm1(1)))
    assert main([*words[:1], "--failures", "-1", "--output", str(tmp_path)]) == 2
