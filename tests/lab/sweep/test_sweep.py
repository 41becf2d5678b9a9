"""`ddp sweep`: a run for each trial, none trained twice, the best one named; and an Optuna search that is continued."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path

import pytest

from ddp_core.base.errors import UserError
from ddp_core.record.directory import find_runs
from ddp_lab.sweep.plan import read_plan
from tests.support.commands import Ended, ddp, forked, wait_until
from tests.support.layout_cases import FILES
from tests.support.processes import HANG

STOPS = str(FILES / "stops.py")
GRID = f"""
experiment = "{STOPS}"
metric = "test_accuracy"
[set]
max_steps = 4
[train]
device = "cpu"
log-every = 1
[grid]
optimizer.lr = [0.01, 0.1]
micro_batch = [4, 8]
"""
SEARCH = f"""
experiment = "{STOPS}"
trials = 3
[set]
max_steps = 4
data.asks = "never"
[train]
device = "cpu"
[search]
optimizer.lr = {{ low = 0.0001, high = 1.0, log = true }}
micro_batch = [2, 4]
"""


def write(folder: Path, text: str, name: str = "mine.toml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def sweep(file: Path, *words: object) -> Ended:
    return ddp("sweep", file, "--output", file.parent / "out", *words, module="tests.support.quick")


@pytest.mark.slow
def test_each_combination_is_trained_once_and_the_best_is_named(tmp_path: Path) -> None:
    file = write(tmp_path, GRID)
    ended = sweep(file, "--at-once", "2")
    assert (ended.code, ended.errors) == (0, "")
    runs = list(find_runs(tmp_path / "out"))
    assert len(runs) == 4
    best = max(record["result"]["test_accuracy"] for _, record in runs)
    last = ended.output.splitlines()[-1]
    assert last.startswith("best: ")
    (chosen,) = [record for directory, record in runs if last.endswith(str(directory.path))]
    assert chosen["result"]["test_accuracy"] == best
    again = sweep(file, "--json")
    told = json.loads(again.output.splitlines()[-1])
    assert (again.code, len(told["trials"]), told["unfinished"], again.output.count("training")) == (0, 4, 0, 0)
    assert told["trials"][0]["run"] == last.rpartition(": ")[2]


def test_the_words_of_an_array_are_those_of_the_trials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ddp_lab.sweep import main

    assert main([str(write(tmp_path, GRID)), "--words"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 4
    assert lines[1][-4:] == ["--set", "optimizer.lr=0.01", "--set", "micro_batch=8"]
    assert lines[0][:4] == ["--set", "max_steps=4", "--device", "cpu"]


@pytest.mark.extras("optuna")
def test_a_search_that_was_killed_asks_for_what_it_would_have(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole, killed = (write(tmp_path / name, SEARCH) for name in ("whole", "killed"))
    ended = sweep(whole)
    assert ended.code == 0, ended.output + ended.errors
    with forked("sweep", killed, "--output", killed.parent / "out", module="tests.support.quick") as running:
        wait_until(lambda: "trial 2 of 3" in running.said()[0], HANG, "the second trial")
        os.kill(running.pid, signal.SIGTERM)
        running.end()
    again = sweep(killed)
    assert again.code == 0, again.output + again.errors
    results = []
    for file in (whole, killed):
        told = json.loads(sweep(file, "--look", "--json").output.splitlines()[-1])
        results.append([(trial["settings"], trial["value"]) for trial in told["trials"]])
    assert results[0] == results[1]
    assert len(results[0]) == 3
    changed = sweep(write(killed.parent, SEARCH.replace("high = 1.0", "high = 0.5")))
    assert (changed.code, "another search" in changed.errors) == (2, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GRID.replace("[grid]", "[gird]"), "did you mean grid"),
        (GRID.replace("[0.01, 0.1]", "0.01"), "expected a list"),
        (GRID + "[search]\nseed = [1]\n", "either a table"),
        (GRID.replace("test_accuracy", "test_f1"), "less or more"),
        (GRID.replace("log-every", "log-evry"), "no option log_evry"),
        (SEARCH.replace("low = 0.0001", "low = 2"), "low is less"),
        (SEARCH.replace("log = true", "scale = 1"), "or a range"),
        (SEARCH.replace("trials = 3", "trials = 0"), "whole number"),
        ("metric = 'test_loss'\n[grid]\nseed = [1]\n", "say what is trained"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_plan(write(tmp_path, text), None)


@pytest.mark.slow
def test_a_metric_that_no_run_has_is_named(tmp_path: Path) -> None:
    file = write(tmp_path, GRID.replace('"test_accuracy"', '"test_acuracy"\nmode = "max"').replace("[4, 8]", "[4]"))
    ended = sweep(file)
    assert (ended.code, "did you mean test_accuracy" in ended.errors) == (2, True), ended.errors
