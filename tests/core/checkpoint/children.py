"""Processes that save, and are killed, stopped or starved while they do: imported by children, so it stays light."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from ddp_core.checkpoint import Checkpointer, Fence
from ddp_core.errors import UserError

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "torch.distributed", "torch.nn.parallel", "numpy", "pytest", "ddp_core.checkpoint"]
)


def state_of(step: int, floats: int = 30_000) -> dict[str, Any]:
    """A state whose every number tells its step."""
    return {
        "model": {"weight": torch.full((floats,), float(step)), "bias": torch.full((3, 2), float(step))},
        "optimizer": {"state": {0: {"momentum": torch.full((floats,), -float(step))}}, "betas": (0.9, 0.999)},
        "step": step,
    }


def start(function: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Start `function(*arguments)` in a child with torch already loaded."""
    child = CONTEXT.Process(target=function, args=arguments, daemon=True)
    child.start()
    return child


def ask(function: Callable[..., Any], *arguments: Any, timeout: float = 30) -> Any:
    """What `function(*arguments)` returns in a child."""
    here, there = CONTEXT.Pipe(duplex=False)
    child = start(_answer, there, function, arguments)
    there.close()
    try:
        assert here.poll(timeout), "the child did not answer"
        return here.recv()
    finally:
        child.kill()
        child.join()


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    pipe.send(function(*arguments))


def killed_at(directory: Path, point: str, asynchronous: bool, before: list[int], step: int) -> None:
    """Save the steps `before`, then `step`, and die by SIGKILL at `point` of that save."""
    torch.set_num_threads(1)
    with Checkpointer(directory) as checkpointer:
        for earlier in before:
            checkpointer.save(state_of(earlier), step=earlier, epoch=0, best=True)

    def die(reached: str) -> None:
        if reached == point:
            os.kill(os.getpid(), signal.SIGKILL)

    with Checkpointer(directory, asynchronous=asynchronous, at=die) as checkpointer:
        checkpointer.save(state_of(step), step=step, epoch=0, best=True)


def save_without_end(directory: Path, first: int, asynchronous: bool) -> None:
    """Save one step after the other until somebody kills this process."""
    torch.set_num_threads(1)
    with Checkpointer(directory, asynchronous=asynchronous) as checkpointer:
        for step in range(first, first + 100_000):
            checkpointer.save(state_of(step), step=step, epoch=0, best=step % 3 == 0)


def save_under_a_file_limit(directory: Path, limit: int, asynchronous: bool) -> tuple[str, int, str]:
    """Save step 20 with RLIMIT_FSIZE set; return where it failed, the exit code and the message."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    checkpointer = Checkpointer(directory, asynchronous=asynchronous)
    where = "save"
    try:
        checkpointer.save(state_of(20), step=20, epoch=0)
        where = "check"
        for _ in range(1000):
            checkpointer.check()
            time.sleep(0.005)
        return "nothing failed", 0, ""
    except UserError as error:
        return where, int(error.exit_code), str(error)


def stopped_at(directory: Path, point: str, asynchronous: bool) -> None:
    """Take the fence, save step 30, stop by SIGSTOP at `point`, leave with the exit code of what follows."""
    torch.set_num_threads(1)

    def stop(reached: str) -> None:
        if reached == point:
            os.kill(os.getpid(), signal.SIGSTOP)

    try:
        with Checkpointer(
            directory, keep_last=1, fence=Fence.take(directory), asynchronous=asynchronous, at=stop
        ) as checkpointer:
            checkpointer.save(state_of(30), step=30, epoch=0, best=True)
    except UserError as error:
        os._exit(int(error.exit_code))


def stopped_inside_the_fence(directory: Path) -> None:
    """Take the fence and stop oneself while holding its short lock."""
    with Fence.take(directory).holding():
        os.kill(os.getpid(), signal.SIGSTOP)


def take_many(directory: Path, count: int) -> list[int]:
    """The tokens of `count` takes in a row."""
    return [Fence.take(directory).token for _ in range(count)]


def wait_until_stopped(child: BaseProcess, timeout: float = 20) -> None:
    """Return when the child has been stopped by a signal."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return
        assert child.is_alive(), f"the child ended with {child.exitcode} instead of stopping"
        time.sleep(0.005)
    raise AssertionError("the child did not stop")
