"""Functions for child processes that save checkpoints and are killed, stopped or short of space while they save.

The children import this module, so it imports little.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import torch

from ddp_core.base.errors import UserError
from ddp_core.checkpoint import Checkpointer, Fence
from tests.support.commands import wait_until
from tests.support.processes import HANG


def state_of(step: int, floats: int = 30_000) -> dict[str, Any]:
    """A state in which every number tells the step that it belongs to."""
    return {
        "model": {"weight": torch.full((floats,), float(step)), "bias": torch.full((3, 2), float(step))},
        "optimizer": {"state": {0: {"momentum": torch.full((floats,), -float(step))}}, "betas": (0.9, 0.999)},
        "step": step,
    }


def killed_at(directory: Path, point: str, asynchronous: bool, before: list[int], step: int) -> None:
    """Save the steps `before`, then `step`, and die by SIGKILL at `point` of the last save."""
    with Checkpointer(directory) as checkpointer:
        for earlier in before:
            checkpointer.save(state_of(earlier), step=earlier, epoch=0, best=True)

    def die(reached: str) -> None:
        if reached == point:
            os.kill(os.getpid(), signal.SIGKILL)

    with Checkpointer(directory, asynchronous=asynchronous, at=die) as checkpointer:
        checkpointer.save(state_of(step), step=step, epoch=0, best=True)


def save_under_a_file_limit(directory: Path, limit: int, asynchronous: bool) -> tuple[str, int, str]:
    """Save step 20 with RLIMIT_FSIZE set to `limit` bytes; return where it failed, the exit code and the message."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    checkpointer = Checkpointer(directory, asynchronous=asynchronous)
    where = "save"
    try:
        checkpointer.save(state_of(20), step=20, epoch=0)
        where = "check"
        while True:
            checkpointer.check()
            time.sleep(0.005)
    except UserError as error:
        return where, int(error.exit_code), str(error)


def stopped_inside_the_fence(directory: Path) -> None:
    """Take the fence and stop this process while it holds the fence's short lock."""
    with Fence.take(directory).holding():
        _stop_here()


def _stop_here() -> None:
    """Stop this process by SIGSTOP before the calling thread does anything more.

    A signal to the process goes to its main thread. On a busy machine it takes long until the main thread is scheduled,
    and meanwhile a thread that writes would go on.
    """
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def take_many(directory: Path, count: int) -> list[int]:
    """Take the fence `count` times in a row; return the tokens."""
    return [Fence.take(directory).token for _ in range(count)]


def wait_until_stopped(child: BaseProcess) -> None:
    """Wait until the child has been stopped by a signal."""

    def is_stopped() -> bool:
        assert child.is_alive(), f"the child ended with {child.exitcode} instead of stopping"
        return psutil.Process(child.pid).status() == psutil.STATUS_STOPPED

    wait_until(is_stopped, HANG, "the child stops")
