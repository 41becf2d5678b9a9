"""A run that a callback ends early: the same step and the same bits on every layout, after a kill, and in verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_core.cli.compare import facts
from ddp_core.record.reading import Run
from tests.support.commands import ddp, train, trained

STOPS = str(Path(__file__).with_name("experiment_files") / "stops.py")
DP = ("--layout", "dp", "--nproc-per-node", "2")
DDP = ("--layout", "ddp", "--nproc-per-node", "2")
EARLY = {"step": 12, "of": 160}


def ended(record: dict[str, Any]) -> tuple[Any, ...]:
    return record["status"], record["ended_early"], record["weights_sha256"], record["optimizer_sha256"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, tuple[Any, ...]]:
    """A run with patience 2 on one process, and how it ended."""
    output = tmp_path_factory.mktemp("alone")
    record = train(output, STOPS)
    return Run(trained(output)[0].path), ended(record)


def kind(name: str) -> tuple[str, ...]:
    return (STOPS, "--set", f"data.asks={name}")


def test_the_record_tells_where_and_why_it_ended(alone: tuple[Run, tuple[Any, ...]]) -> None:
    run, _ = alone
    assert run.status == "completed"
    assert run.ended_early is not None
    assert {"step": run.ended_early["step"], "of": run.ended_early["of"]} == EARLY
    assert "test_loss has not got better in 2 evaluations" in run.ended_early["reason"]
    assert run.figures["steps"] == 12
    found = facts([(run._directory, run.record)])["runs"][0]
    assert found["ended_early"] == run.ended_early


@pytest.mark.full
def test_patience_survives_a_kill_and_another_layout(alone: tuple[Run, tuple[Any, ...]], tmp_path: Path) -> None:
    killed = ddp("train", STOPS, "--device", "cpu", "--output", tmp_path, "--synchronous-save", "--fault", "kill@10")
    assert killed.code == -9
    assert ended(train(tmp_path, STOPS, "--resume", "auto", ranks=2)) == alone[1]


@pytest.mark.full
def test_what_one_rank_alone_asks_for_is_refused(tmp_path: Path) -> None:
    words = (*kind("rank 1"), *DDP, "--device", "cpu", "--output", tmp_path, "--max-restarts", "0")
    found = ddp("train", *words)
    assert (found.code, "Traceback" in found.errors) == (2, False), found.errors
    assert "OnRankOne asked to end the run on rank 1 of 2 alone (rank 1 has had enough)" in found.errors


@pytest.mark.slow
def test_verify_ends_at_the_same_step(alone: tuple[Run, tuple[Any, ...]]) -> None:
    found = ddp("verify", alone[0].path, *DDP, module="tests.support.quick")
    assert (found.code, found.output.splitlines()[-1]) == (0, "identical"), found.output + found.errors
    assert "ended early at step 12 of 160" in found.output


@pytest.mark.slow
def test_verify_says_where_the_end_is_another_one(tmp_path: Path) -> None:
    train(tmp_path, *kind("step"))
    found = ddp("verify", trained(tmp_path)[0].path, env={"STOPS_AT": "7"}, module="tests.support.quick")
    assert found.code == 1
    assert "another end: the run ended early at step 6 of 160: six are enough" in found.output
    assert "the repetition ended early at step 7" in found.output


@pytest.mark.slow
def test_a_run_that_ended_early_is_extended_by_a_longer_one_alone(tmp_path: Path) -> None:
    train(tmp_path, STOPS)
    again = train(tmp_path, STOPS, "--resume", str(trained(tmp_path)[0].path))
    assert again["ended_early"] == trained(tmp_path)[1]["ended_early"], "there is nothing left to train"
    longer = train(tmp_path, STOPS, "--resume", "auto", "--set", "epochs=50")
    assert longer["ended_early"]["step"] == 16, "the next evaluation was no better either"
    assert longer["ended_early"]["of"] == 200
