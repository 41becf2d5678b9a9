"""The last reference to a process group is dropped in a thread."""

from __future__ import annotations

import queue
import threading

from ddp_core.base.parting import let_go
from tests.support.processes import HANG


class Group:
    def __init__(self, dropped_in: queue.SimpleQueue[str]) -> None:
        self.dropped_in = dropped_in

    def __del__(self) -> None:
        self.dropped_in.put(threading.current_thread().name)


def test_a_group_is_dropped_in_a_thread_of_its_own() -> None:
    dropped_in: queue.SimpleQueue[str] = queue.SimpleQueue()
    let_go([Group(dropped_in)])
    assert dropped_in.get(timeout=HANG) == "parting"
