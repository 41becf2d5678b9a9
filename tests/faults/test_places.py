"""A port or a run directory that another process already uses."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ddp_core.record.directory import find_runs
from tests.faults.launches import DOTS, Watch, launched, train_words
from tests.faults.matrix import COMMAND, record_row
from tests.support.commands import Ended, ddp, running, trained, wait_until
from tests.support.processes import HANG


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which a socket already listens."""
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        yield int(holder.getsockname()[1])


LIGHT = """
import sys
from ddp_core.cli import main
code = main()
assert "torch" not in sys.modules, "torch was loaded before the answer"
sys.exit(code)
"""


def timed(*words: str | Path, env: Mapping[str, str] | None = None) -> tuple[Ended, float]:
    """How a command ended, and its seconds without those in which it waited for a core.

    A Python of its own runs the command, as a user's does, and fails where the command has loaded torch.
    """
    started = time.monotonic()
    with running(*words, env=env, program=("-c", LIGHT)) as process:
        # The process stays a zombie here, whose account can still be read.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        seconds = time.monotonic() - started - waited_for_a_core(process.pid)
        output, errors = process.communicate()
    return Ended(process.returncode, output, errors), seconds


def waited_for_a_core(pid: int) -> float:
    """The seconds in which a process could have run, but others had all cores; 0 where the kernel does not count."""
    account = Path(f"/proc/{pid}/schedstat")
    return int(account.read_text().split()[1]) / 1e9 if account.exists() else 0.0


def test_a_rendezvous_on_a_port_in_use(taken: int) -> None:
    ended, seconds = timed("rendezvous", "--port", str(taken))
    assert (ended.code, ended.errors) == (4, f"ddp: error: port {taken} is in use; choose another with --port\n")
    record_row(24, "rendezvous: 4, before torch is loaded", {COMMAND: seconds})


def test_a_process_group_on_a_port_in_use(tmp_path: Path, taken: int) -> None:
    words = ["train", DOTS, "--layout", "ddp", "--device", "cpu", "--output", str(tmp_path)]
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ended, seconds = timed(*words, env=world | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken)})
    assert ended.code == 4
    assert ended.errors.count("\n") == 1
    assert f"MASTER_PORT={taken} is in use" in ended.errors
    record_row(24, "process group: 4, naming MASTER_PORT, before torch is loaded", {COMMAND: seconds})


def test_a_second_run_in_a_directory_is_told_who_is_there(tmp_path: Path) -> None:
    with launched(*train_words(tmp_path, "--layout", "single", ranks=1), pause=0.05) as launch:
        Watch(tmp_path).wait_for_step(2)
        directory, _ = trained(tmp_path)
        words = ["train", DOTS, "--device", "cpu", "--output", tmp_path, "--resume", directory.path]
        ended, seconds = timed(*words)
        holder = rf"process {launch.pid} on {re.escape(socket.gethostname())}, since \d{{4}}-"
        assert ended.code == 2
        assert re.search(holder, ended.errors)
        assert ended.errors.count("\n") == 1
        assert launch.lives
        assert directory.read()["status"] == "running"
    record_row(30, "2, naming process, host and since when, before torch is loaded", {COMMAND: seconds})


def test_a_second_launch_beside_a_live_run_trains_only_where_it_is_told_to(tmp_path: Path) -> None:
    with launched(*train_words(tmp_path, "--layout", "single", ranks=1), pause=600) as launch:
        wait_until(lambda: any(tmp_path.glob("*/*/run.json")), HANG, "run.json")
        directory, _ = trained(tmp_path)
        words = ["train", DOTS, "--device", "cpu", "--output", tmp_path]
        ended = ddp(*words, "--resume", "auto")
        assert ended.code == 2
        assert re.search(rf"using {directory.path}: process {launch.pid} on .*--resume never", ended.errors)
        assert ended.errors.count("\n") == 1
        assert ddp(*words, "--resume", "never", "--set", "epochs=1").code == 0
        assert launch.lives
    assert sorted(record["status"] for _, record in find_runs(tmp_path)) == ["completed", "running"]
    record_row(30, "a second launch: 2, naming the directory, its process and --resume never; with that, it trains")
