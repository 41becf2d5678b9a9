"""What follows the loss of a process: the rest is ended, the lost rank is named, and gloo's message is shortened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from ddp_core.distributed.processes import await_processes, end_processes, state_of
from ddp_core.distributed.world import World
from ddp_core.observe.heartbeat import name_lost_peer, renew_heartbeat
from tests.core.observe.test_heartbeat import beat
from tests.support.commands import wait_until
from tests.support.processes import HANG

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
PARENT = "import subprocess, time; subprocess.Popen(['sleep', '600']); print(1, flush=True); time.sleep(600)"


def start(code: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def members(group: int) -> list[int]:
    return [pid for pid in psutil.pids() if state_of(pid) == "running" and os.getpgid(pid) == group]


def test_one_that_is_stopped_is_not_waited_for() -> None:
    process = start("import time; print(1, flush=True); time.sleep(600)")
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: state_of(process.pid) == "stopped", HANG, "it is stopped")
    started = time.monotonic()
    await_processes([process], 200)
    end_processes([process], signal.SIGTERM, 200)
    assert time.monotonic() - started < 60
    assert process.returncode == -signal.SIGKILL
    assert state_of(process.pid) == "gone"


def test_one_that_does_not_listen_is_killed_when_patience_ends() -> None:
    deaf, listening = start(DEAF), start("import time; print(1, flush=True); time.sleep(600)")
    started = time.monotonic()
    end_processes([deaf, listening], signal.SIGTERM, 0.3)
    assert 0.3 <= time.monotonic() - started < 60
    assert (deaf.returncode, listening.returncode) == (-signal.SIGKILL, -signal.SIGTERM)


def test_what_a_dead_worker_leaves_in_its_group_goes_with_it() -> None:
    worker = start(PARENT)
    worker.kill()
    worker.wait()
    (left,) = members(worker.pid)
    end_processes([worker], signal.SIGTERM, 1)
    wait_until(lambda: state_of(left) == "gone", HANG, "the group is empty")


def test_a_dead_process_of_this_host_is_named(tmp_path: Path) -> None:
    gone = start("print(1, flush=True)")
    gone.wait()
    beat(tmp_path, 1, pid=gone.pid)
    beat(tmp_path, 2)
    assert name_lost_peer(tmp_path, World(0, 3), "Connection reset") == "rank 1 (node 1), which is dead,"


def test_one_that_noticed_the_loss_and_left_is_not_named(tmp_path: Path) -> None:
    gone = [start("print(1, flush=True)") for _ in range(2)]
    for rank, process in enumerate(gone, 1):
        process.wait()
        beat(tmp_path, rank, pid=process.pid)
    renew_heartbeat(tmp_path, World(2, 3))
    assert name_lost_peer(tmp_path, World(0, 3), "Connection reset") == "rank 1 (node 1), which is dead,"


def test_the_one_at_the_address_of_the_error_is_named(tmp_path: Path) -> None:
    for rank in (1, 2):
        beat(tmp_path, rank, host="elsewhere", address=f"10.0.0.{rank}")
    assert name_lost_peer(tmp_path, World(0, 3), "Read error [10.0.0.2]:5002: reset") == "rank 2 (node 2)"
    assert name_lost_peer(tmp_path, World(0, 3), "no address") == "a peer"
