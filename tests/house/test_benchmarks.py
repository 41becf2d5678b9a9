"""How benchmarks put their turns together."""

from __future__ import annotations

from pathlib import Path

from benchmarks.turns import best_bare, summary

ROOT = Path(__file__).parents[2]


def test_the_best_bare_loop_is_that_of_the_least_median_and_ratios_are_to_it() -> None:
    times = {"bare loop": (4.0, 4.0, 4.0), "bare, fused": (1.0, 2.0, 9.0), "ours": (0.5, 3.0, 9.0)}
    seconds = {name: [{"step": each} for each in turns] for name, turns in times.items()}
    assert best_bare(seconds) == "bare, fused"
    assert summary(seconds, base="bare, fused")["ours"]["ratio"] == 1.0
    assert summary(seconds)["ours"]["ratio"] == 0.75
