"""Ending worker processes: asked first, killed after a while, and never left half alive.

torch's agent signals a worker's whole process group, which also takes the loader processes of the step that is to be
finished; and it waits half a minute for a worker that is stopped and cannot hear it. Here the worker alone is asked,
one that cannot hear is killed at once, and what a dead worker leaves in its group goes with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from typing import Protocol

import psutil

_POLL_SECONDS = 0.02


class Process(Protocol):
    """A child as subprocess.Popen gives it, however it was started."""

    @property
    def pid(self) -> int:
        """Its number."""

    def poll(self) -> int | None:
        """The exit code, None while it runs."""

    def wait(self) -> int:
        """The exit code, once it has ended."""

    def send_signal(self, number: int, /) -> None:
        """Send it, where the process runs."""

    def kill(self) -> None:
        """SIGKILL."""


def end_processes(processes: Iterable[Process], number: signal.Signals, patience: float) -> None:
    """Ask each with the signal, wait `patience` seconds for all together, kill the rest with their process groups.

    Each process is the leader of its group.
    """
    processes = list(processes)
    for process in processes:
        if is_stopped(process.pid):
            process.kill()
        else:
            process.send_signal(number)
    await_processes(processes, patience)
    for process in processes:
        # Also where the worker is gone: its loader processes outlive it by seconds.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def await_processes(processes: Iterable[Process], patience: float) -> None:
    """Wait for those that are not stopped to leave by themselves, `patience` seconds at most."""
    waiting, deadline = list(processes), time.monotonic() + patience
    while time.monotonic() < deadline:
        waiting = [process for process in waiting if process.poll() is None and not is_stopped(process.pid)]
        if not waiting:
            return
        time.sleep(_POLL_SECONDS)


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped (SIGSTOP) and so hears no other signal."""
    return state_of(pid) == "stopped"


def state_of(pid: int) -> str:
    """'running', 'stopped' or 'gone', as this host's kernel sees it."""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return "gone"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    return "stopped" if status == psutil.STATUS_STOPPED else "running"
