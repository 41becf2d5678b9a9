"""What a launcher leaves to others when its workers have ended: the record, the rendezvous, and its restarts.

Tests launch/elastic.py, too.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

from ddp_core.base.errors import ExitCode
from ddp_core.distributed.reports import report_end
from ddp_core.distributed.world import World
from ddp_core.launch.elastic import _run_agent
from ddp_core.launch.launch import _close_record
from ddp_core.launch.meeting import join
from ddp_core.launch.nodes import Meeting
from ddp_core.record.lock import RunLock
from tests.core.record.test_directory import make, request
from tests.support.commands import command

ALONE = Meeting(launch_id="mine")


def test_the_record_of_a_run_that_another_launcher_goes_on_with_is_left_alone(tmp_path: Path) -> None:
    directory = make(tmp_path, launch_id="mine")
    with RunLock(directory.path):
        _close_record(request(tmp_path), ALONE, ExitCode.PEERS_LOST)
    assert directory.read()["status"] == "running"
    _close_record(request(tmp_path), ALONE, ExitCode.PEERS_LOST)
    record = directory.read()
    assert (record["status"], record["exit_code"], record["message"]) == ("failed", 6, "the workers were lost")


@pytest.mark.parametrize(("code", "closes"), [(ExitCode.STOPPED, False), (ExitCode.NUMERICS, True)])
def test_a_launch_that_was_stopped_can_go_on_with_its_id(tmp_path: Path, code: ExitCode, closes: bool) -> None:
    report_end(World(report_dir=tmp_path), code, "it ended")
    failed = RunResult(state=WorkerState.FAILED)
    agent: Any = SimpleNamespace(run=lambda: failed, kill_workers=pytest.fail)
    handler = join(ALONE, "127.0.0.1", 60)
    try:
        assert _run_agent(agent, nullcontext(), handler, tmp_path, ALONE, join_seconds=60) == code
        assert handler.is_closed() is closes
    finally:
        handler.shutdown()


@pytest.mark.full
def test_a_launch_asks_git_before_its_workers_are_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that replaces a lost one has the code of the others, whatever was committed since they began."""
    git, calls = tmp_path / "git", tmp_path / "calls"
    git.write_text(f'#!/bin/sh\necho "$3" >>{calls}\n[ "$3" = status ] || echo 0123456789\n')
    git.chmod(0o755)
    monkeypatch.delenv("DDP_GIT_COMMIT", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    words = ["train", "toy_mlp", "--set", "max_steps=1", "--layout", "ddp", "--nproc-per-node", "2", "--device", "cpu"]
    ended = command(*words, "--output", tmp_path / "runs")
    assert ended.code == 0, ended.errors
    assert calls.read_text().split() == ["rev-parse", "status"]
