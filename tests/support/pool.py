"""Jobs in forked processes of their own, some at a time; what each has found comes as it ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from ddp_core.base.process import die_with_parent

Job = TypeVar("Job")
Found = TypeVar("Found")
_FORK = multiprocessing.get_context("fork")


def in_processes(
    jobs: Sequence[Job],
    work: Callable[[Job], Found],
    workers: int,
    seconds: float = float("inf"),
    *,
    is_alone: Callable[[Job], bool],
) -> Iterator[tuple[Job, Found | None]]:
    """What `work` finds for each job; None where its process has died. A job that `is_alone` runs beside no other.

    No job is begun after so many seconds. All processes end when this one does.
    """
    waiting = list(jobs)
    running: dict[Connection, tuple[Job, Any]] = {}
    end = time.monotonic() + seconds

    def may_begin() -> bool:
        one = is_alone(waiting[0]) or any(is_alone(job) for job, _ in running.values())
        return not running or (len(running) < workers and not one)

    while (waiting and time.monotonic() < end) or running:
        while waiting and time.monotonic() < end and may_begin():
            job = waiting.pop(0)
            here, there = _FORK.Pipe(duplex=False)
            process = _FORK.Process(target=_work, args=(there, work, job))
            process.start()
            there.close()
            running[here] = (job, process)
        for pipe in wait(list(running)):
            assert isinstance(pipe, Connection)
            job, process = running.pop(pipe)
            found: Found | None = None
            with contextlib.suppress(EOFError):
                found = pipe.recv()
            process.join()
            yield job, found


def _work(pipe: Connection, work: Callable[[Job], Found], job: Job) -> None:
    # So an interrupt of the command, or its death, ends what the job has started, too.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    pipe.send(work(job))
