"""Requests to stop, in every way there is, and the resume afterwards on another layout."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from ddp_core.checkpoint import find_checkpoints, verify
from ddp_core.distributed.stop import describe_signal
from ddp_core.observe.metrics import read_metrics
from tests.faults.launches import DOTS, Launch, Watch, check_aftermath, train_words
from tests.faults.matrix import record_row
from tests.support.commands import Ended, ddp, trained

PAUSE = 0.01


def check_stopped(output: Path, ended: Ended, why: str) -> int:
    """Check that the run exited with 75 and saved everything up to its last step; return that step."""
    assert ended.code == 75
    found = re.fullmatch(
        rf"ddp: stopped: at step (\d+) \({why}\); saved, continue with `ddp train \S*dots\.py .*--resume auto.*`",
        ended.errors.strip(),
    )
    assert found is not None, ended.errors
    step = int(found[1])
    directory, record = trained(output)
    assert (record["status"], record["exit_code"]) == ("stopped", 75)
    newest = find_checkpoints(directory.checkpoints)[0]
    assert newest.step == step
    verify(newest)
    assert read_metrics(directory.metrics, "step")[-1]["step"] == step
    return step


def resume(output: Path, *words: str) -> None:
    ended = ddp("train", DOTS, "--device", "cpu", "--output", output, "--resume", "auto", *words)
    assert ended.code == 0, ended.errors


@pytest.mark.slow
def test_a_stopped_run_has_lost_nothing_and_goes_on_elsewhere(tmp_path: Path, digest: str) -> None:
    with Launch(*train_words(tmp_path), pause=PAUSE) as launch:
        Watch(tmp_path).wait_for_step(10)
        started = time.monotonic()
        launch.signal(signal.SIGTERM)
        ended = launch.wait()
        seconds = time.monotonic() - started
    step = check_stopped(tmp_path, ended, "SIGTERM")
    resume(tmp_path, "--layout", "dp", "--nproc-per-node", "3")
    record = check_aftermath(tmp_path, digest)
    assert [attempt["layout"]["kind"] for attempt in record["attempts"]] == ["ddp", "dp"]
    assert "resumed at step " + str(step) in trained(tmp_path)[0].log.read_text()
    record_row(28, "SIGTERM: 75, saved at the step that was running", {"all left": seconds})
    record_row(32, "from ddp x 2 to dp x 3: continues at the next step, same weights")


@pytest.mark.slow
def test_control_c_saves(tmp_path: Path, digest: str) -> None:
    with Launch(*train_words(tmp_path, ranks=1), pause=PAUSE) as launch:
        Watch(tmp_path).wait_for_step(6)
        started = time.monotonic()
        launch.signal(signal.SIGINT)
        ended = launch.wait()
        seconds = time.monotonic() - started
    check_stopped(tmp_path, ended, "SIGINT")
    resume(tmp_path)
    check_aftermath(tmp_path, digest)
    record_row(29, "once: 75, saved", {"all left": seconds})


@pytest.mark.parametrize("layout", [["ddp"], pytest.param(["ddp", "--launcher", "spawn"], marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_second_control_c_leaves_at_once(tmp_path: Path, layout: list[str]) -> None:
    words = train_words(tmp_path, "--layout", *layout)
    with Launch(*words, pause=600) as launch:
        Watch(tmp_path).wait_for_record()
        launch.signal(signal.SIGINT)
        time.sleep(0.5)
        assert launch.lives, "three micro-batches of ten minutes each are to be finished first"
        started = time.monotonic()
        launch.signal(signal.SIGINT)
        ended = launch.wait()
        seconds = time.monotonic() - started
    assert ended.code == 130
    assert "Traceback" not in ended.errors
    record_row(29, "twice: 130 at once, no process left", {"all left": seconds})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGUSR1, ["--stop-signal", "USR1"]),
        (signal.SIGUSR1, ["--stop-signal", "SIGUSR1", "--launcher", "spawn"]),
        (signal.SIGHUP, []),
        (signal.SIGTERM, ["--layout", "single", "--nproc-per-node", "1"]),
        (signal.SIGTERM, ["--layout", "dp"]),
        (signal.SIGTERM, ["--launcher", "spawn"]),
        (None, ["--max-seconds", "1"]),
    ],
)
def test_other_ways_to_ask(tmp_path: Path, digest: str, number: signal.Signals | None, words: list[str]) -> None:
    with Launch(*train_words(tmp_path, *words), pause=PAUSE) as launch:
        if number is not None:
            Watch(tmp_path).wait_for_step(10)
            launch.signal(number)
        ended = launch.wait()
    why = "time limit" if number is None else describe_signal(number)
    check_stopped(tmp_path, ended, why)
    resume(tmp_path)
    check_aftermath(tmp_path, digest)
    record_row(28, f"{' '.join([*([number.name] if number else []), *words])}: 75, saved")


@pytest.mark.slow
def test_loader_processes_survive_the_request_until_the_save(tmp_path: Path, digest: str) -> None:
    with Launch(*train_words(tmp_path, "--workers", "2"), pause=0.03) as launch:
        Watch(tmp_path).wait_for_step(10)
        launch.signal(signal.SIGTERM)
        ended = launch.wait()
    check_stopped(tmp_path, ended, "SIGTERM")
    resume(tmp_path)
    check_aftermath(tmp_path, digest)
    record_row(28, "SIGTERM with loader processes: 75, saved")
