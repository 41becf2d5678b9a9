"""A port or a run directory that another process already uses."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.faults.launches import DOTS, Launch, Watch, train_words
from tests.faults.matrix import record_row
from tests.faults.workers import run_workers
from tests.support.commands import ddp, trained


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which a socket already listens."""
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        yield int(holder.getsockname()[1])


def test_a_rendezvous_on_a_port_in_use(taken: int) -> None:
    started = time.monotonic()
    ended = ddp("rendezvous", "--port", str(taken))
    seconds = time.monotonic() - started
    assert (ended.code, ended.errors) == (4, f"ddp: error: port {taken} is in use; choose another with --port\n")
    record_row(24, "rendezvous: 4", seconds)


def _meet_at(port: int, rank: int) -> None:
    os.environ.update(MASTER_PORT=str(port), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")


def test_a_process_group_on_a_port_in_use(tmp_path: Path, taken: int) -> None:
    started = time.monotonic()
    words = ["train", DOTS, "--layout", "ddp", "--device", "cpu", "--output", str(tmp_path), "--timeout", "4"]
    [ended] = run_workers(words, 1, partial(_meet_at, taken))
    seconds = time.monotonic() - started
    assert ended.code == 4
    assert f"MASTER_PORT={taken} is in use" in ended.errors
    record_row(24, "process group: 4, naming MASTER_PORT", seconds)


def test_a_second_run_in_a_directory_is_told_who_is_there(tmp_path: Path) -> None:
    with Launch(*train_words(tmp_path, "--layout", "single", ranks=1), pause=0.05) as launch:
        Watch(tmp_path).wait_for_step(2)
        directory, _ = trained(tmp_path)
        started = time.monotonic()
        ended = ddp("train", DOTS, "--device", "cpu", "--output", tmp_path, "--resume", directory.path)
        seconds = time.monotonic() - started
        holder = rf"process {launch.pid} on {re.escape(socket.gethostname())}, since \d{{4}}-"
        assert ended.code == 2
        assert re.search(holder, ended.errors)
        assert ended.errors.count("\n") == 1
        assert launch.lives
        assert directory.read()["status"] == "running"
    record_row(30, "2, naming process, host and since when", seconds)
