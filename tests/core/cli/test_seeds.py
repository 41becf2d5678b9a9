"""`--seeds`: one run for each seed, none trained twice, and the figures over them."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ddp_core.base.errors import UserError
from ddp_core.cli.compare import compare_runs
from ddp_core.cli.seeds import seeds_in
from ddp_core.record.directory import find_runs
from ddp_core.record.over_seeds import over_seeds, students_t
from tests.support.commands import Ended, ddp, forked, wait_until
from tests.support.layout_cases import FILES
from tests.support.processes import HANG

STOPS = str(FILES / "stops.py")


def seeds(output: Path, *words: object, file: str = STOPS) -> Ended:
    full = ("train", file, "--set", "max_steps=4", *words, "--device", "cpu", "--output", output)
    return ddp(*full, module="tests.support.quick")


def test_what_is_completed_is_not_trained_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = seeds(tmp_path, "--seeds", "3,5", "--at-once", "2")
    assert (first.code, first.errors) == (0, "")
    more = seeds(tmp_path, "--seeds", "3-5")
    assert more.code == 0, more.errors
    assert [more.output.count(f"seed {seed}: training") for seed in (3, 4, 5)] == [0, 1, 0]
    assert "stops over the seeds 3, 4, 5: mean ± standard deviation (n)" in more.output
    runs = [record for _, record in find_runs(tmp_path)]
    assert sorted(record["experiment"]["seed"] for record in runs) == [3, 4, 5]
    assert compare_runs([tmp_path], as_json=True) == 0
    groups = json.loads(capsys.readouterr().out)
    figure = groups[0]["over_seeds"]["figures"]["test_loss"]
    assert figure["runs"] == 3
    assert figure["mean"] == pytest.approx(sum(record["result"]["test_loss"] for record in runs) / 3)


@pytest.mark.slow
def test_seeds_that_were_stopped_go_on(tmp_path: Path) -> None:
    words = ("train", STOPS, "--seeds", "0-1", "--device", "cpu", "--output", tmp_path, "--set", "data.asks=never")
    long = ("--set", "epochs=100000", "--checkpoint-every", "50")
    with forked(*words, *long, module="tests.support.quick") as running:
        wait_until(lambda: any(tmp_path.rglob("step-*.json")), HANG, "a checkpoint")
        os.kill(running.pid, signal.SIGTERM)
        ended = running.end()
    assert ended.code == 75, ended.output + ended.errors
    ((_, record),) = find_runs(tmp_path)
    assert (record["status"], record["experiment"]["seed"]) == ("stopped", 0)
    again = ddp(*words, *long, "--max-seconds", "1", module="tests.support.quick")
    assert again.code == 75, again.errors
    attempts = {record["experiment"]["seed"]: len(record["attempts"]) for _, record in find_runs(tmp_path)}
    assert attempts == {0: 2, 1: 1}


@pytest.mark.slow
def test_an_edited_file_is_trained_anew(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(Path(STOPS).read_text())
    assert seeds(tmp_path / "out", "--seeds", "1", file=str(file)).code == 0
    file.write_text(Path(STOPS).read_text().replace("nn.Tanh()", "nn.ReLU()"))
    assert "seed 1: training" in seeds(tmp_path / "out", "--seeds", "1", file=str(file)).output


@pytest.mark.parametrize("text", ["", "x", "4-1", "1-", "-3", "0.5", "0-99999"])
def test_seeds_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--seeds"):
        seeds_in(text)


def test_each_seed_counts_once() -> None:
    assert seeds_in("0-2, 7,1") == [0, 1, 2, 7]


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--set", "seed=1"), ("--resume", "x"), ("--fork", "x"), ("--nnodes", "2")])
def test_what_contradicts_several_seeds_is_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    ended = seeds(tmp_path, "--seeds", "0-1", *words)
    assert (ended.code, "Traceback" in ended.errors) == (2, False)
    assert "--seeds" in ended.errors


@pytest.mark.parametrize(("degrees", "bound"), [(1, 12.7062), (2, 4.3027), (9, 2.2622), (30, 2.0423), (999, 1.9623)])
def test_the_bounds_are_those_of_the_tables_of_student(degrees: int, bound: float) -> None:
    assert students_t(degrees) == pytest.approx(bound, abs=5e-5)


def test_the_interval_is_students() -> None:
    same: dict[str, Any] = {"status": "completed", "data_sha256": "a", "fingerprint": {}}
    records = [
        {**same, "experiment": {"seed": seed}, "result": {"test_loss": value, "steps": 4}}
        for seed, value in enumerate([1.0, 2.0, 3.0, 4.0])
    ]
    other = [{"data_sha256": "b"}, {"fingerprint": {"numerics": "portable", "numerics_rules": 2}}]
    others = [{**records[0], "experiment": {"seed": 9}, **each} for each in other]
    found = over_seeds([*others, *records, records[0], {**records[0], "status": "failed"}])
    assert found is not None
    assert found.left_out == 2
    (figure,) = found.figures
    # t for 3 degrees of freedom is 3.1824 (the tables of Student).
    half = 3.1824 * math.sqrt(5 / 3) / 2
    assert (figure.runs, figure.mean, figure.deviation) == (4, 2.5, pytest.approx(math.sqrt(5 / 3)))
    assert (figure.low, figure.high) == (pytest.approx(2.5 - half, abs=1e-4), pytest.approx(2.5 + half, abs=1e-4))
    assert figure.words == "2.5 ± 1.3 (4)"
    assert over_seeds(records[:1]) is None


def test_other_data_and_other_numerics_are_trained_anew(tmp_path: Path) -> None:
    file, numbers = tmp_path / "mine.py", tmp_path / "numbers.txt"
    text = Path(STOPS).read_text().replace(".manual_seed(3)", f".manual_seed(int(open({str(numbers)!r}).read()))")
    file.write_text(text)
    said = []
    for number, words in (("3", ()), ("3", ()), ("4", ()), ("4", ("--numerics", "portable"))):
        numbers.write_text(number)
        ended = seeds(tmp_path / "out", "--seeds", "0", *words, file=str(file))
        assert ended.code == 0, ended.errors
        said.append("seed 0: training" in ended.output)
    assert said == [True, False, True, True]


def test_a_copy_with_other_code_is_trained_anew(tmp_path: Path) -> None:
    said = []
    for folder, more in (("one", ""), ("same", ""), ("other", "\nCHANGED = True\n")):
        file = tmp_path / folder / "mine.py"
        file.parent.mkdir()
        file.write_text(Path(STOPS).read_text() + more)
        ended = seeds(tmp_path / "out", "--seeds", "0", file=str(file))
        assert ended.code == 0, ended.errors
        said.append("seed 0: training" in ended.output)
    assert said == [True, False, True]
