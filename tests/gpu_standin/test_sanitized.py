"""torch's sanitizer, told of kernels by several threads, raises no false alarm."""

from __future__ import annotations

import importlib.util
import threading
from typing import Any

import pytest
from torch.cuda._sanitizer import EventHandler

from tests.support.commands import ROOT
from tests.support.processes import ask


def _alarms(is_guarded: bool) -> int:
    """How often a reader that has waited for the writer's stream is accused, while a third stream is busy."""
    spec = importlib.util.spec_from_file_location(
        "sanitized", ROOT / "tests" / "gpu" / "sanitized" / "sitecustomize.py"
    )
    assert spec is not None
    assert spec.loader is not None
    sanitized = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sanitized)

    class Handler(EventHandler):
        pass

    if is_guarded:
        sanitized.one_at_a_time(Handler)
    handler: Any = Handler()
    is_over = threading.Event()

    def launch(stream: int, memory: int, is_write: bool) -> int:
        sets = (set(), {memory}) if is_write else ({memory}, set())
        return len(handler._handle_kernel_launch(stream, *sets, set(), "kernel", {memory: ["it"]}))

    def be_busy() -> None:
        while not is_over.is_set():
            launch(3, -1, is_write=True)

    others = [threading.Thread(target=be_busy) for _ in range(3)]
    for other in others:
        other.start()
    found = 0
    for memory in range(400):
        launch(1, memory, is_write=True)
        handler._handle_event_record(7, 1)
        handler._handle_event_wait(7, 2)
        found += launch(2, memory, is_write=False)
    is_over.set()
    for other in others:
        other.join()
    return found


@pytest.mark.parametrize("is_guarded", [True, False])
def test_one_thread_at_a_time_tells_of_a_kernel(is_guarded: bool) -> None:
    found = ask(_alarms, is_guarded)
    assert found == 0 if is_guarded else found > 0
