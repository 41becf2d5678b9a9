"""What the kernel says of a process: a zombie is gone, and a wait for a disk is told once, when it has lasted."""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace

import pytest

from ddp_core.distributed import processes
from ddp_core.distributed.processes import DiskWaits, state_of


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
    monkeypatch.setattr(processes, "_waits_for_disk", waiting.__contains__)
    monkeypatch.setattr(processes, "time", clock)
    told = []
    waits = DiskWaits(2.0)
    for now in [{1}, {1, 2}, {1, 2}, {1}, {1, 2}, {2}, {1, 2}, {1}, {1}]:
        waiting.clear()
        waiting.update(now)
        told.append(waits.found([1, 2]))
    assert told == [[], [], [1], [], [], [], [2], [], [1]]
