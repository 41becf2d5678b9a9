"""Runs cases in processes of their own, some at a time, and gives their outcomes as they come."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from ddp_core.base.process import die_with_parent
from tests.foreign import driver
from tests.foreign.fleet import Case

BAD = {"SILENT", "FAULT", "HANG", "not tried"}
"""Outcomes that are faults of this project, or hide what might be one."""
_FORK = multiprocessing.get_context("fork")


def outcomes(
    cases: Sequence[Case],
    workers: int,
    seconds: float = float("inf"),
    ways: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """What `driver.run` finds for each case, a large one alone; no case is begun after so many seconds.

    `ways` holds the layouts of a case by its key, where they are not all of them. `driver.load` comes before.
    """
    waiting = list(cases)
    running: dict[Connection, tuple[Case, Any]] = {}
    end = time.monotonic() + seconds
    while (waiting and time.monotonic() < end) or running:
        while waiting and time.monotonic() < end and _may_begin(waiting[0], running, workers):
            case = waiting.pop(0)
            here, there = _FORK.Pipe(duplex=False)
            process = _FORK.Process(target=_work, args=(there, case, (ways or {}).get(case.key, driver.COLUMNS)))
            process.start()
            there.close()
            running[here] = (case, process)
        for pipe in wait(list(running)):
            assert isinstance(pipe, Connection)
            case, process = running.pop(pipe)
            found = _answer(pipe)
            process.join()
            yield case, found


def _may_begin(case: Case, running: Mapping[Connection, tuple[Case, Any]], workers: int) -> bool:
    is_large = case.is_large or any(each.is_large for each, _ in running.values())
    return not running or (len(running) < workers and not is_large)


def _work(pipe: Connection, case: Case, ways: Sequence[str]) -> None:
    # So an interrupt of the command, or its death, ends the trainings, too.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    pipe.send(driver.run(case, ways))


def _answer(pipe: Connection) -> dict[str, Any]:
    with contextlib.suppress(EOFError):
        found: dict[str, Any] = pipe.recv()
        return found
    said = "the process that trains the case has died"
    return {"outcomes": {"single": "FAULT"}, "said": {"single": said}, "on": {}, "seconds": 0.0}
