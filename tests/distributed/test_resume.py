"""A run that is killed and resumed, also on another layout, trains each sample once and ends as if never killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_core.observe.metrics import read_metrics
from tests.support.commands import ddp, train, trained
from tests.support.layout_cases import ADAMW_MLP

# An epoch has 23 steps, so that the second epoch begins within the run and checkpoints lie inside epochs.
WORDS = (ADAMW_MLP, "--set", "max_steps=26", "--checkpoint-every", "5", "--log-every", "1")
AUTO = ("--resume", "auto")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The digests of a run that was never killed."""
    return digests(train(tmp_path_factory.mktemp("undisturbed"), *WORDS))


def digests(record: dict[str, Any]) -> tuple[str, str]:
    return record["weights_sha256"], record["optimizer_sha256"]


def kill_at(output: Path, step: int, *words: str, ranks: int = 0) -> None:
    """Start or resume the run, and have rank 0 killed (SIGKILL) after a step."""
    # Without synchronous saves, the process may or may not die before its last checkpoint is written.
    full = [*words, *AUTO, "--synchronous-save", "--fault", f"kill@{step}"]
    if ranks:
        with pytest.raises(AssertionError, match=r"ranks \[0\] died with \[-9\]"):
            train(output, *full, ranks=ranks)
    else:
        assert ddp("train", *full, "--device", "cpu", "--output", output).code == -9
    record = trained(output)[1]
    assert record["status"] == "running", "nobody was left to write more"


def check_whole(output: Path, undisturbed: tuple[str, str], record: dict[str, Any]) -> None:
    assert record["status"] == "completed"
    assert digests(record) == undisturbed, "each sample in its step, once"
    directory, _ = trained(output)
    steps = [entry["step"] for entry in read_metrics(directory.metrics, "step")]
    assert steps == sorted(set(steps)), "rolled-back steps are taken back in the metrics"
    assert steps[-1] == 26


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
    kill_at(tmp_path, 12, *WORDS, "--layout", "dp", "--nproc-per-node", "3")
    kill_at(tmp_path, 25, *WORDS, ranks=4)  # in the second epoch
    record = train(tmp_path, *WORDS, *AUTO)
    check_whole(tmp_path, undisturbed, record)
    assert [attempt["layout"]["kind"] for attempt in record["attempts"]] == ["ddp", "dp", "ddp", "single"]


@pytest.mark.slow
def test_a_lost_worker_is_replaced_within_the_launch(tmp_path: Path, undisturbed: tuple[str, str]) -> None:
    words = [*WORDS, "--layout", "ddp", "--nproc-per-node", "2", "--recovery", "restart", "--fault", "kill@13:1"]
    ended = ddp("train", *words, "--device", "cpu", "--output", tmp_path)
    assert ended.code == 0, ended.errors
    assert "rank 1 (node 0) was killed (SIGKILL)" in ended.errors
    assert "starting the workers again" in ended.errors
    record = trained(tmp_path)[1]
    check_whole(tmp_path, undisturbed, record)
    assert len(record["attempts"]) == 2


@pytest.mark.slow
def test_without_restarts_the_launch_ends_with_6_and_can_be_resumed(
    tmp_path: Path, undisturbed: tuple[str, str]
) -> None:
    words = [*WORDS, "--layout", "ddp", "--max-restarts", "0", "--fault", "kill@13:0"]
    ended = ddp("train", *words, "--device", "cpu", "--output", tmp_path)
    assert ended.code == 6, ended.errors
    assert "--resume auto" in ended.errors
    assert "Traceback" not in ended.errors
    record = trained(tmp_path)[1]
    assert (record["status"], record["exit_code"]) == ("failed", 6)
    check_whole(tmp_path, undisturbed, train(tmp_path, *WORDS, *AUTO, ranks=2))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_plain_reduction_resumes_on_its_own_layout_to_the_same_bits(tmp_path: Path, ranks: int) -> None:
    words = [*WORDS, "--reduction", "plain"]
    expected = digests(train(tmp_path / "whole", *words, ranks=ranks))
    kill_at(tmp_path / "killed", 13, *words, ranks=ranks)
    record = train(tmp_path / "killed", *words, *AUTO, ranks=ranks)
    assert digests(record) == expected


@pytest.mark.slow
def test_half_precision_resumes_with_its_scaler(tmp_path: Path) -> None:
    words = [*WORDS, "--set", "precision=fp16"]
    expected = digests(train(tmp_path / "whole", *words))
    kill_at(tmp_path / "killed", 13, *words)
    assert digests(train(tmp_path / "killed", *words, *AUTO, ranks=2)) == expected


@pytest.mark.slow
def test_channels_innermost_resume_with_the_optimizers_states_in_their_places(tmp_path: Path) -> None:
    words = ["digits", "--set", "max_steps=6", "--set", "memory_format=channels_last", "--checkpoint-every", "2"]
    expected = digests(train(tmp_path / "whole", *words))
    kill_at(tmp_path / "killed", 5, *words)
    assert digests(train(tmp_path / "killed", *words, *AUTO, ranks=2)) == expected


@pytest.mark.slow
def test_loader_processes_change_nothing(tmp_path: Path, undisturbed: tuple[str, str]) -> None:
    kill_at(tmp_path, 13, *WORDS, "--workers", "1")
    check_whole(tmp_path, undisturbed, train(tmp_path, *WORDS, *AUTO, "--workers", "2"))


@pytest.mark.slow
def test_a_run_can_be_named_or_left_alone(tmp_path: Path, undisturbed: tuple[str, str]) -> None:
    kill_at(tmp_path, 13, *WORDS)
    directory, _ = trained(tmp_path)
    fresh = train(tmp_path / "fresh", *WORDS, "--resume", "never")
    assert len(fresh["attempts"]) == 1
    elsewhere = ddp("train", *WORDS, "--resume", directory.path, "--device", "cpu", "--output", tmp_path / "unused")
    assert elsewhere.code == 0, elsewhere.errors
    assert "resumed at step 10" in elsewhere.output
    assert not (tmp_path / "unused" / "adamw_mlp").exists()
    assert digests(directory.read()) == digests(fresh) == undisturbed


@pytest.mark.slow
def test_a_completed_run_is_not_continued_by_itself(tmp_path: Path) -> None:
    train(tmp_path, *WORDS)
    assert ddp("train", *WORDS, *AUTO, "--device", "cpu", "--output", tmp_path).code == 0
    assert len(list(tmp_path.glob("*/*/run.json"))) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", [1, 5, 22, 23, 24, 26, 45, 46])
def test_killed_at_any_step(tmp_path: Path, step: int) -> None:
    words = [ADAMW_MLP, "--checkpoint-every", "4"]
    expected = digests(train(tmp_path / "whole", *words))
    killed = tmp_path / "killed"
    kill_at(killed, step, *words, ranks=2)
    assert digests(train(killed, *words, *AUTO, ranks=3)) == expected
