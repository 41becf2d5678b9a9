"""Ends worker processes: asks them first, kills them after a while, and leaves none of their children behind.

torch's agent signals a worker's whole process group, so the signal also ends the loader processes that the worker needs
to finish its step. And the agent waits half a minute for a worker that is stopped (SIGSTOP) and cannot handle the
signal. Here the signal goes to the worker alone, a stopped worker is killed at once, and the processes that a dead
worker leaves in its group are killed, too.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterable
from typing import Protocol

import psutil

_POLL_SECONDS = 0.02


class Process(Protocol):
    """A child process, however it was started, with these parts of subprocess.Popen."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...


def end_processes(processes: Iterable[Process], number: signal.Signals, patience: float) -> None:
    """Send each the signal, wait `patience` seconds for all together, kill the rest with their process groups.

    Each process must be the leader of its group.
    """
    processes = list(processes)
    for process in processes:
        if is_stopped(process.pid):
            process.kill()
        else:
            process.send_signal(number)
    await_processes(processes, patience)
    for process in processes:
        # Its loader processes may outlive a worker by some seconds.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def await_processes(processes: Iterable[Process], patience: float) -> None:
    """Wait for the processes that are not stopped to end by themselves, `patience` seconds at most."""
    waiting, deadline = list(processes), time.monotonic() + patience
    while time.monotonic() < deadline:
        waiting = [process for process in waiting if process.poll() is None and not is_stopped(process.pid)]
        if not waiting:
            return
        time.sleep(_POLL_SECONDS)


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped (SIGSTOP) and so cannot handle a signal."""
    return state_of(pid) == "stopped"


class DiskWaits:
    """Tells of processes that a disk or a file server leaves without an answer: the kernel lets no signal end them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: dict[int, float] = {}

    def found(self, pids: Iterable[int]) -> list[int]:
        """Those that have been found waiting, each time since `seconds` ago or longer; each wait is told once."""
        now = time.monotonic()
        self._since = {pid: self._since.get(pid, now) for pid in pids if _status(pid) == psutil.STATUS_DISK_SLEEP}
        late = [pid for pid, since in self._since.items() if now - since >= self._seconds]
        self._since |= dict.fromkeys(late, math.inf)
        return late


def _status(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.Error:
        return psutil.STATUS_DEAD


def state_of(pid: int) -> str:
    """'running', 'stopped' or 'gone', as this host's kernel sees it."""
    status = _status(pid)
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    return "stopped" if status == psutil.STATUS_STOPPED else "running"
