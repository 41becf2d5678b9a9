"""benchmarks/README.md says of every goal whether it is met, as the recorded results have it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.goals import Goal, commands, goals, saving, sums, table, whole_runs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "benchmarks" / "README.md").read_text()
HOW = "run `python -m benchmarks.goals` and put its tables into the pages"


def test_the_page_has_the_table_of_the_recorded_results() -> None:
    assert table() in PAGE, HOW


def test_the_page_has_whole_runs_and_saves() -> None:
    assert whole_runs() in PAGE, HOW
    assert saving() in PAGE, HOW
    assert commands() in PAGE, HOW


def test_the_page_has_the_sums_that_need_no_order() -> None:
    assert sums() in (ROOT / "docs" / "reference" / "cost-of-exactness.md").read_text(), HOW


def test_a_goal_missed_by_a_hair_is_missed() -> None:
    assert not Goal("", "", 0.62, 0.6201).met
    assert Goal("", "", 0.62, 0.62).met
    assert not Goal("", "", 4.0, 3.9999, most=False).met
    assert "**missed**" in Goal("", "", 0.6, 0.63).row()


def test_every_benchmark_with_goals_is_there() -> None:
    assert {goal.benchmark for goal in goals()} == {
        "trainer_step",
        "scaling",
        "loader",
        "nodes",
        "reduction",
        "sharded",
        "fully_sharded",
        "exact_end_to_end",
        "startup",
        "numerics",
    }
