"""Real worker processes for tests: quick to start (torch is loaded once), with a hard timeout, never left behind."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ddp_core.distributed.world import free_port

HANG = 240
"""Seconds after which a process is taken to hang; so many, because a busy machine may need most of them."""

CONTEXT = multiprocessing.get_context("forkserver")
"""Starts processes as forks of a server that has torch and this project loaded."""
# The first optimizer of a process imports torch._dynamo, which takes as long as importing torch itself. What is not
# loaded here is loaded by each fork anew.
CONTEXT.set_forkserver_preload(
    [
        *("torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "torch.utils.serialization"),
        *("torch._dynamo.backends.common", "torch._dynamo.backends.cudagraphs", "torch.export._trace"),
        *("torch.distributed.tensor.experimental._func_map", "torch.profiler._cupti_monitor", "sympy.tensor.tensor"),
        *("numpy", "numpy.ma", "pydantic", "safetensors.torch", "psutil", "pytest", "encodings.idna"),
        *("ddp_core.cli.entry", "ddp_core.cli.train", "ddp_core.cli.prepare", "ddp_core.cli.verify"),
        *("ddp_core.cli.evaluate", "ddp_core.cli.bundle", "ddp_core.cli.audit.audit"),
        *("ddp_core.launch.launch", "ddp_core.run.run", "ddp_core.data.builders", "ddp_core.model.builders"),
        *("ddp_core.trainers.data_parallel", "ddp_core.trainers.distributed", "ddp_core.trainers.single"),
        *("ddp_core.trainers.sharded", "ddp_core.sharding.rows"),
        *("tests.support.commands", "tests.support.quick", "tests.support.warmed"),
    ]
)


def start(function: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Start `function(*arguments)` in a process that has torch loaded; the process ends when this process ends."""
    process = CONTEXT.Process(target=_alone, args=(function, arguments), daemon=True)
    process.start()
    return process


def _alone(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    _settle()
    function(*arguments)


def _settle() -> None:
    # What the server has loaded is not garbage. If the collector looked at it, every page of it would be copied.
    gc.freeze()
    import torch

    torch.set_num_threads(1)


def ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run `function(*arguments)` in a process of its own, with torch loaded and no launcher; return its result.

    Raises AssertionError with the traceback if the function raises, if the process ends badly, or after HANG seconds.
    """
    here, there = CONTEXT.Pipe(duplex=False)
    process = start(_answer, there, function, arguments)
    there.close()
    try:
        assert here.poll(HANG), f"no answer within {HANG} s"
        succeeded, value = here.recv()
        assert succeeded, f"it failed:\n{value}"
        process.join(HANG)
        assert process.exitcode == 0, f"it left with {process.exitcode} after its answer"
        return value
    finally:
        process.kill()
        process.join()


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send((True, function(*arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _enter(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    arguments: tuple[Any, ...],
    results: Any,
    stack: Path,
) -> None:
    # Also works where the main thread waits in C++ and cannot run Python.
    faulthandler.register(signal.SIGUSR2, file=stack.open("w"), all_threads=True)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    _settle()
    try:
        results.put((rank, True, function(rank, world_size, *arguments)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))


def run_processes(function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = HANG) -> list[Any]:
    """Run `function(rank, world_size, *arguments)` in `world_size` processes; return what each returned, by rank.

    The launcher's variables are set; the function starts its own process group. Results must pickle without torch's
    shared memory (return numbers, strings, numpy arrays). Raises AssertionError with the first traceback, or after
    `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="stacks-") as folder:
        return _run_processes(function, world_size, arguments, timeout, Path(folder))


def _run_processes(
    function: Callable[..., Any], world_size: int, arguments: tuple[Any, ...], timeout: float, folder: Path
) -> list[Any]:
    port, results = free_port(), CONTEXT.Queue()
    stacks = [folder / str(rank) for rank in range(world_size)]
    workers = [
        CONTEXT.Process(target=_enter, args=(function, rank, world_size, port, arguments, results, stacks[rank]))
        for rank in range(world_size)
    ]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + timeout
    collected: dict[int, Any] = {}
    try:
        while len(collected) < world_size:
            try:
                rank, succeeded, value = results.get(timeout=min(1.0, max(0.01, deadline - time.monotonic())))
            except queue.Empty:
                missing = [rank for rank in range(world_size) if rank not in collected]
                dead = [rank for rank in missing if workers[rank].exitcode not in (None, 0)]
                assert not dead, f"ranks {dead} died with {[workers[rank].exitcode for rank in dead]}"
                if time.monotonic() >= deadline:
                    at = "".join(_stack(workers[rank], stacks[rank]) for rank in missing)
                    raise AssertionError(f"ranks {missing} did not answer within {timeout} s:\n{at}") from None
                continue
            assert succeeded, f"rank {rank} failed:\n{value}"
            collected[rank] = value
        for worker in workers:
            worker.join(max(0.1, deadline - time.monotonic()))
            assert worker.exitcode == 0, f"a worker left with {worker.exitcode} after its result"
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
            worker.join()
    return [collected[rank] for rank in range(world_size)]


def _stack(worker: BaseProcess, file: Path) -> str:
    """Where the worker's threads are, as the worker itself tells."""
    if worker.pid is None or not file.exists():
        return f"{worker.name} has not begun\n"
    os.kill(worker.pid, signal.SIGUSR2)
    time.sleep(1)
    return f"{worker.name}:\n{file.read_text()}"
