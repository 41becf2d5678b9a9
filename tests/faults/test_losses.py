"""Workers that die, stop, raise or are slow, and a launcher that dies: real processes on one node, torchrun's agent."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from ddp_core.distributed.processes import state_of
from ddp_core.observe.metrics import read_metrics
from tests.faults.launches import DOTS, Watch, check_aftermath, launched, train_words
from tests.faults.matrix import AGAIN, LATE, NOTICED, record_row
from tests.support.commands import Ended, ddp, run_workers, trained, wait_until
from tests.support.processes import HANG

PAUSE = 0.002
RESTART = ("--recovery", "restart")
KILLED = (
    "ddp: rank {} (node 0) was killed (SIGKILL)\n"
    "ddp: starting the workers again from the last checkpoint (2 more restarts allowed)\n"
)


def struck(output: Path, fault: str, word: str, *words: str, ranks: int) -> tuple[Ended, float, float]:
    """How a launch ends that meets the fault, and how long after it the launch has said `word`, and trained again."""
    watch = Watch(output)
    with launched(*train_words(output, *words, "--fault", fault, ranks=ranks), pause=PAUSE) as launch:
        wait_until(lambda: word in launch.said()[1], HANG, "the loss is noticed")
        noticed = time.time() - watch.when_struck(fault)
        recovered = watch.wait_for_new_step(watch.when_struck(fault))
        ended = launch.end()
    assert ended.code == 0, ended.errors
    return ended, noticed, recovered


@pytest.mark.full
@pytest.mark.parametrize("shard", ["none", pytest.param("parameters", marks=pytest.mark.slow)])
def test_a_killed_worker_is_replaced(tmp_path: Path, digest: str, shard: str) -> None:
    words = ("--shard", shard, *RESTART)
    ended, noticed, recovered = struck(tmp_path, "kill@30:1", "killed", *words, ranks=2 if shard == "none" else 3)
    assert ended.errors == KILLED.format(1)
    assert "resumed at step 28" in ended.output
    assert len(check_aftermath(tmp_path, digest)["attempts"]) == 2
    said = f"--shard {shard}: noticed after {noticed:.2f} s, trains again after {recovered:.1f} s, same weights"
    record_row(1, said, {NOTICED: noticed, AGAIN: recovered})


@pytest.mark.slow
def test_a_stopped_worker_is_replaced(tmp_path: Path, digest: str) -> None:
    ended, noticed, recovered = struck(tmp_path, "pause@30:1", "is stopped", *RESTART, "--timeout", "3", ranks=2)
    assert "rank 1 (node 0) is stopped; it is killed now" in ended.errors
    assert noticed > 3
    check_aftermath(tmp_path, digest)
    said = f"worker: noticed {noticed - 3:.1f} s after the timeout, same weights"
    record_row(5, said, {LATE: noticed - 3, AGAIN: recovered})


@pytest.mark.slow
def test_a_killed_worker_is_named_where_its_peer_left_sooner(tmp_path: Path, digest: str) -> None:
    file = Path(DOTS).with_name("dots_dying_slowly.py")
    ended = ddp(*train_words(tmp_path, *RESTART, experiment=file), timeout=HANG)
    assert ended.code == 0
    assert ended.errors == KILLED.format(0)
    check_aftermath(tmp_path, digest)


@pytest.mark.full
@pytest.mark.parametrize("when", ["while it trains", pytest.param("while it starts", marks=pytest.mark.slow)])
def test_workers_leave_with_their_launcher(tmp_path: Path, digest: str, when: str) -> None:
    with launched(*train_words(tmp_path), pause=0.1) as launch:
        if when == "while it trains":
            Watch(tmp_path).wait_for_step(10)
        else:
            wait_until(lambda: len(launch.workers()) == 2, HANG, "the workers are there")
        workers = launch.everything()[1:]
        started = time.monotonic()
        launch.signal(signal.SIGKILL)
        wait_until(lambda: not any(state_of(worker.pid) != "gone" for worker in workers), HANG, "the workers are gone")
        gone = time.monotonic() - started
        assert launch.end().code == -signal.SIGKILL
    if when == "while it trains":
        assert Watch(tmp_path).step() < 80, "they did not wait for the end of the training"
        assert ddp("train", DOTS, "--device", "cpu", "--output", tmp_path, "--resume", "auto").code == 0
        check_aftermath(tmp_path, digest)
        record_row(
            4, f"workers gone after {gone:.2f} s; resumed on another layout, same weights", {"workers gone": gone}
        )


@pytest.mark.full
def test_an_exception_is_told_once_by_the_rank_that_raised(tmp_path: Path, digest: str) -> None:
    started = time.monotonic()
    with launched(*train_words(tmp_path, "--fault", "raise@13:1")) as launch:
        ended = launch.end()
    seconds = time.monotonic() - started
    assert ended.code == 2
    assert "Traceback" not in ended.errors, "no frame of it is the user's"
    last = ended.errors.splitlines()[-2:]
    assert last == ["ddp: error: rank 1 (node 0): RuntimeError: scripted fault raise@13:1", "ddp: rank 0 left after it"]
    directory, record = trained(tmp_path)
    assert "scripted fault" in (directory.path / "error-rank-1.txt").read_text()
    assert "rank 1 (node 0), step 14" in (directory.path / "error-rank-1.txt").read_text()
    assert record["status"] == "failed"
    record_row(15, "exit 2; told by rank 1; 'rank 0 left after it'", {"whole launch": seconds})


def test_a_slow_worker_is_named_not_killed(tmp_path: Path) -> None:
    words = ["train", DOTS, "--layout", "ddp", "--device", "cpu", "--set", "epochs=1", "--timeout", "10"]
    answers = run_workers([*words, "--output", str(tmp_path), "--fault", "slow@2:1"], 2)
    assert [answer.code for answer in answers] == [0, 0]
    directory, record = trained(tmp_path)
    assert len(record["attempts"]) == 1
    found = re.search(r"slowest: rank 1 \(node 0\), p95 (\d+) ms per step", directory.log.read_text())
    assert found is not None
    assert int(found[1]) > 190
    assert read_metrics(directory.metrics, "evaluation")
    record_row(7, f"one attempt, exit 0; 'rank 1 (node 0), p95 {found[1]} ms per step'")
