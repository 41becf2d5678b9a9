"""Random experiments: a seed always writes the same file, each file builds and learns, and two of them are trained."""

from __future__ import annotations

import json
from pathlib import Path
from runpy import run_path

import pytest
from torch.nn import functional
from torch.utils.data import default_collate

from tests.foreign import random_fleet
from tests.foreign.driver import COLUMNS, SECONDS
from tests.foreign.random_experiments import HABITS, experiment_of, write
from tests.support.commands import command, without_limits


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_two_hundred_files_build_and_compute_a_gradient_and_an_update(tmp_path: Path) -> None:
    for seed in range(200):
        file = run_path(str(write(seed, tmp_path)))
        samples = file["data"]().train
        inputs, targets = file.get("collate", default_collate)([samples[at] for at in range(4)])
        model = file["model"]()
        outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        loss = file["loss"](outputs, targets) if "loss" in file else functional.cross_entropy(outputs, targets)
        assert loss.isfinite(), seed
        loss.backward()
        if "optimizer" in file:
            file["optimizer"](model).step()


def test_every_habit_and_layout_is_drawn_some_time() -> None:
    titles = " ".join(experiment_of(seed).split("\n\n")[1] for seed in range(1000))
    assert [habit.name for habit in HABITS if habit.name not in titles] == []
    assert {way for seed in range(50) for way in random_fleet.ways_of(seed)} == set(COLUMNS)


def test_refusals_are_counted_by_what_they_say_and_are_not_bad() -> None:
    said = "error: rank {} (node 0): the model's {}.weight differs"
    ends = {"single": "identical", "ddp x 2": "refused"}
    rows = [
        {"seed": seed, "outcomes": ends, "said": {"ddp x 2": said.format(rank, name)}}
        for seed, rank, name in ((1, 1, "first"), (2, 0, "last"))
    ]
    assert list(random_fleet.refusals(rows).values()) == [[1, 2]]
    counts = random_fleet.summary(rows)
    assert counts["bad_seeds"] == []
    assert counts["layouts"]["ddp x 2"] == {"refused": 2}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_seeds_end_alike_and_leave_no_file_but_the_counts(tmp_path: Path) -> None:
    words = ("--seeds", "0:2", "--output", str(tmp_path))
    ended = command(*words, program=("-m", "tests.foreign.random_fleet"), env=without_limits(), timeout=6 * SECONDS)
    assert ended.code == 0, ended.output + ended.errors
    assert "0 of 2 seeds are bad" in ended.output
    results = json.loads((tmp_path / "random.json").read_text())["results"]
    assert [row["seed"] for row in results["rows"]] == [0, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["random.json"]
