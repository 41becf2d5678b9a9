"""A run that is killed and resumed, also on another layout, trains each sample once and ends as if never killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_core.observe.metrics import read_metrics
from tests.distributed.resuming import AUTO, WORDS, check_whole, digests, kill_at
from tests.faults.matrix import record_row
from tests.support.commands import train, trained
from tests.support.layout_cases import ADAMW_MLP


def test_killed_alone_and_continued_on_three_ranks(tmp_path: Path, undisturbed: tuple[str, str]) -> None:
    kill_at(tmp_path, 13, *WORDS)
    record = train(tmp_path, *WORDS, *AUTO, ranks=3)
    check_whole(tmp_path, undisturbed, record)
    assert len(record["attempts"]) == 2
    resumed = [entry["step"] for entry in read_metrics(trained(tmp_path)[0].metrics, "resume")]
    assert resumed == [10]


@pytest.mark.slow
def test_killed_three_times_on_other_layouts(tmp_path: Path, undisturbed: tuple[str, str]) -> None:
    kill_at(tmp_path, 3, *WORDS, ranks=2)  # before the first checkpoint
    kill_at(tmp_path, 23, *WORDS, "--layout", "dp", "--nproc-per-node", "3")  # the last step of the first epoch
    kill_at(tmp_path, 25, *WORDS, ranks=4)  # in the second epoch
    record = train(tmp_path, *WORDS, *AUTO)
    check_whole(tmp_path, undisturbed, record)
    kinds = [attempt["layout"]["kind"] for attempt in record["attempts"]]
    assert kinds == ["ddp", "dp", "ddp", "single"]
    record_row(32, f"killed thrice, each time on another layout ({', '.join(kinds)}): same weights")


@pytest.mark.full
def test_states_that_are_kept_for_an_audit_are_the_same_on_shards_after_a_kill(tmp_path: Path) -> None:
    words = (ADAMW_MLP, "--set", "max_steps=26", "--checkpoint-every", "4", "--guard", "off")
    keep = ("--keep-for-audit", "3")
    kept = train(tmp_path / "single", *words, *keep)["kept"]
    assert [state["step"] for state in kept["states"]] == [9, 18, 26]
    kill_at(tmp_path / "cut", 14, *words, *keep)
    # A resume needs no option for that. The state lies on the ranks in more parts than that of any other layout.
    assert train(tmp_path / "cut", *words, *AUTO, "--shard", "parameters", ranks=2)["kept"] == kept


DIGITS = ("digits", "--set", "max_steps=6", "--set", "memory_format=channels_last", "--checkpoint-every", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "killed_at", "ranks_before", "ranks_after"),
    [
        ((*WORDS, "--reduction", "plain"), 13, 0, 0),
        ((*WORDS, "--reduction", "plain"), 13, 2, 2),
        ((*WORDS, "--set", "precision=fp16"), 13, 0, 2),
        (DIGITS, 5, 0, 2),
    ],
    ids=["plain", "plain on its own layout", "half precision with its scaler", "channels innermost"],
)
def test_other_trainings_resume_to_the_same_bits(
    tmp_path: Path, words: tuple[str, ...], killed_at: int, ranks_before: int, ranks_after: int
) -> None:
    expected = digests(train(tmp_path / "whole", *words, ranks=ranks_before))
    kill_at(tmp_path / "killed", killed_at, *words, ranks=ranks_before)
    assert digests(train(tmp_path / "killed", *words, *AUTO, ranks=ranks_after)) == expected
