"""Samples that differ from one read to the next, beside those that were digested: found while they are trained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.commands import ddp, trained
from tests.support.layout_cases import FILES

RANDOM_ROWS = str(FILES / "random_rows.py")
WARNED = r"warning: samples? [\d, ]+(and \d more )?(is|are) not the same when read again in step \d+, so no result"


@pytest.mark.parametrize(
    "layout",
    [(), ("--layout", "ddp", "--nproc-per-node", "2"), ("--workers", "1")],
    ids=["single", "ddp", "with workers"],
)
def test_random_samples_are_found_in_the_first_epoch_and_recorded(tmp_path: Path, layout: tuple[str, ...]) -> None:
    words = ("train", RANDOM_ROWS, "--device", "cpu", "--output", tmp_path, *layout)
    ended = ddp(*words)
    assert ended.code == 0, ended.errors
    assert len(re.findall(WARNED, ended.output)) == 1, ended.output
    record = trained(tmp_path)[1]
    assert record["data_sha256"] is None
    assert record["data"]["digest_of"].startswith("nothing: items differ from one read to the next (sample")
    # What is random stays so when the run goes on.
    assert ddp(*words, "--set", "epochs=2", "--resume", "auto").code == 0
    record = trained(tmp_path)[1]
    assert (len(record["attempts"]), record["data_sha256"]) == (2, None)


def test_the_samples_are_named(tmp_path: Path) -> None:
    ended = ddp("train", RANDOM_ROWS, "--device", "cpu", "--output", tmp_path)
    (step,) = re.findall(r"when read again in step (\d+)", ended.output)
    named = re.search(r"samples (\d+), (\d+), (\d+)", ended.output)
    assert (step, named is not None) == ("1", True), ended.output


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_whose_draws_are_keyed_are_the_same_when_read_again(tmp_path: Path, workers: int) -> None:
    words = ("train", str(FILES / "draws_collate.py"), "--device", "cpu", "--output", tmp_path, "--workers", workers)
    ended = ddp(*words)
    assert ended.code == 0
    assert "read again" not in ended.output + ended.errors
