"""Losses that are NaN, sizes that do not divide, and ranks that disagree: workers of a launcher other than `ddp`."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from ddp_core import cli
from ddp_core.checkpoint import newest_valid
from tests.faults.launches import DOTS, check_aftermath
from tests.faults.matrix import record_row
from tests.support.commands import Prepare, ddp, run_workers, trained
from tests.support.layout_cases import digests

WORDS = ["train", DOTS, "--layout", "ddp", "--device", "cpu", "--checkpoint-every", "4"]


@pytest.mark.full
def test_a_nan_on_one_rank_stops_all_before_the_update(tmp_path: Path, digest: str) -> None:
    answers = run_workers([*WORDS, "--output", str(tmp_path), "--fault", "nan@11:1"], 2)
    assert [answer.code for answer in answers] == [5, 5]
    directory, record = trained(tmp_path)
    assert (record["status"], record["exit_code"]) == ("failed", 5)
    found = re.search(r"loss is nan at step 11 on rank 1 \(node 0\), sample ids (\d+), (\d+)", record["message"])
    assert found is not None, record["message"]
    newest = newest_valid(directory.checkpoints)
    assert newest is not None
    assert newest.step == 8
    assert ddp("train", DOTS, "--device", "cpu", "--output", tmp_path, "--resume", "auto").code == 0
    check_aftermath(tmp_path, digest)
    record_row(14, f"5 on both ranks: '{found[0]}'; resumed, same weights")


@pytest.mark.slow
def test_uneven_shares_end_together_with_the_same_weights(tmp_path: Path) -> None:
    # 100 samples in batches of 12: the last batch has 4 samples, which are two micro-batches for three ranks.
    case = {"uneven": [DOTS, "--set", "data.size=100", "--set", "last_batch=keep", "--set", "epochs=3"]}
    found = {
        (kind, count): digests(case, tmp_path / f"{kind}-{count}", kind, count)
        for kind, count in (("single", 1), ("ddp", 3))
    }
    assert len({value["uneven"] for value in found.values()}) == 1
    steps = {trained(tmp_path / f"{kind}-{count}" / "0")[1]["result"]["steps"] for kind, count in found}
    assert steps == {27}
    record_row(17, "100 samples on 1 and 3 ranks: 27 steps each, same weights")


SIZES = (1, 3, 5, 10, 101)


@pytest.mark.slow
def test_held_out_samples_count_once_on_every_layout(tmp_path: Path) -> None:
    cases = {str(size): [DOTS, "--set", f"data.held_out={size}", "--set", "epochs=1"] for size in SIZES}
    layouts = (("single", 1), ("ddp", 3))
    for kind, count in layouts:
        digests(cases, tmp_path / f"{kind}-{count}", kind, count)
    # That each is counted once, core/trainers/test_evaluation.py counts by hand.
    for number, size in enumerate(SIZES):
        runs = [trained(tmp_path / f"{kind}-{count}" / str(number)) for kind, count in layouts]
        results = {(run["result"]["test_loss"], run["result"]["test_accuracy"]) for _, run in runs}
        assert len(results) == 1, (size, results)
    record_row(19, "the same loss and accuracy on single and ddp x 3")


def _add_words(more: tuple[str, ...], rank: int) -> None:
    if rank == 1:
        original = cli.main
        pytest.MonkeyPatch().setattr(cli, "main", lambda words: original([*words, *more]))


def _other_code(rank: int) -> None:
    if rank == 1:
        code = {"version": "0.0.9", "commit": "0123456", "dirty": False}
        pytest.MonkeyPatch().setattr("ddp_core.record.environment.describe_code", lambda: code)


@pytest.mark.parametrize(
    ("differs", "what"),
    [
        pytest.param(partial(_add_words, ("--set", "optimizer.lr=0.06")), "experiment", id="optimizer.lr"),
        pytest.param(
            partial(_add_words, ("--numerics", "portable")), "numerics", id="numerics", marks=pytest.mark.slow
        ),
        pytest.param(_other_code, "code version", id="code", marks=pytest.mark.slow),
    ],
)
def test_what_differs_on_one_rank_is_found_before_training(tmp_path: Path, differs: Prepare, what: str) -> None:
    answers = run_workers([*WORDS, "--output", str(tmp_path)], 2, differs)
    assert [answer.code for answer in answers] == [2, 2]
    said = f"ranks 1 have another {what} than rank 0: start every node with the same code"
    assert said in answers[0].errors
    assert list(tmp_path.glob("*/*/run.json")) == []
    record_row(27, f"another {what}: 2 on both ranks")
