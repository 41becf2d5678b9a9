"""Real worker processes for tests: quick to start (torch is loaded once), with a hard timeout, never left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
# torch._dynamo is what the first optimizer of a process imports, at the price of torch itself.
_CONTEXT.set_forkserver_preload(
    [
        *("torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "numpy", "pydantic", "safetensors.torch"),
        *("ddp_core.cli", "ddp_core.launch.elastic", "ddp_core.launch.launch", "ddp_core.trainers.data_parallel"),
        *(
            "ddp_core.trainers.distributed",
            "ddp_core.trainers.single",
            "ddp_core.data.builders",
            "ddp_core.model.builders",
        ),
    ]
)


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _enter(
    function: Callable[..., Any], rank: int, world_size: int, port: int, arguments: tuple[Any, ...], results: Any
) -> None:
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
    # What the server has loaded is no garbage; to look at it would copy every page of it.
    gc.freeze()
    import torch

    torch.set_num_threads(1)
    try:
        results.put((rank, True, function(rank, world_size, *arguments)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))


def run_processes(function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 60) -> list[Any]:
    """Run `function(rank, world_size, *arguments)` in `world_size` processes; return what each returned, by rank.

    The launcher's variables are set; the function starts its own process group. Results must pickle without torch's
    shared memory (return numbers, strings, numpy arrays). Raises AssertionError with the first traceback, or after
    `timeout` seconds.
    """
    port, results = free_port(), _CONTEXT.Queue()
    workers = [
        _CONTEXT.Process(target=_enter, args=(function, rank, world_size, port, arguments, results))
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
                assert time.monotonic() < deadline, f"ranks {missing} did not answer within {timeout} s"
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
