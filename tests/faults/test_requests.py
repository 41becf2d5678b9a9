"""A request to stop, and the resume afterwards on another layout; core/distributed/test_stop.py has all ways to ask."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from ddp_core.checkpoint import find_checkpoints, verify
from ddp_core.observe.metrics import read_metrics
from tests.faults.launches import DOTS, Launch, Watch, check_aftermath, train_words
from tests.faults.matrix import record_row
from tests.support.commands import ddp, trained

PAUSE = 0.01


@pytest.mark.slow
def test_a_stopped_run_has_lost_nothing_and_goes_on_elsewhere(tmp_path: Path, digest: str) -> None:
    with Launch(*train_words(tmp_path), pause=PAUSE) as launch:
        Watch(tmp_path).wait_for_step(10)
        started = time.monotonic()
        launch.signal(signal.SIGTERM)
        ended = launch.wait()
        seconds = time.monotonic() - started
    assert ended.code == 75
    found = re.fullmatch(
        r"ddp: stopped: at step (\d+) \(SIGTERM\); saved, continue with `ddp train \S*dots\.py .*--resume auto.*`",
        ended.errors.strip(),
    )
    assert found is not None, ended.errors
    step = int(found[1])
    directory, record = trained(tmp_path)
    assert (record["status"], record["exit_code"]) == ("stopped", 75)
    newest = find_checkpoints(directory.checkpoints)[0]
    assert newest.step == step == read_metrics(directory.metrics, "step")[-1]["step"]
    verify(newest)
    elsewhere = ("--layout", "dp", "--nproc-per-node", "3", "--device", "cpu")
    resumed = ddp("train", DOTS, *elsewhere, "--output", tmp_path, "--resume", "auto")
    assert resumed.code == 0, resumed.errors
    record = check_aftermath(tmp_path, digest)
    assert [attempt["layout"]["kind"] for attempt in record["attempts"]] == ["ddp", "dp"]
    assert f"resumed at step {step}" in trained(tmp_path)[0].log.read_text()
    record_row(28, "SIGTERM: 75, saved at the step that was running", {"all left": seconds})
    record_row(32, "from ddp x 2 to dp x 3: continues at the next step, same weights")
