"""What the kernel says of a process and its waits for a disk; and how processes that remain after a loss are ended."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from ddp_core.distributed import processes
from ddp_core.distributed.processes import DiskWaits, await_processes, end_processes, state_of
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


def test_a_zombie_is_gone() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert state_of(child) == "gone"
    assert state_of(os.getpid()) == "running"
    os.waitpid(child, 0)
    assert state_of(child) == "gone"


def test_each_wait_for_a_disk_is_told_once_and_only_if_it_has_lasted(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: set[int] = set()
    clock = SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr(
        processes, "_status", lambda pid: psutil.STATUS_DISK_SLEEP if pid in waiting else psutil.STATUS_RUNNING
    )
    monkeypatch.setattr(processes, "time", clock)
    told = []
    waits = DiskWaits(2.0)
    for now in [{1}, {1, 2}, {1, 2}, {1}, {1, 2}, {2}, {1, 2}, {1}, {1}]:
        waiting.clear()
        waiting.update(now)
        told.append(waits.found([1, 2]))
    assert told == [[], [], [1], [], [], [], [2], [], [1]]


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
