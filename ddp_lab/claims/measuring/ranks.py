"""Real ranks for a measurement: processes with a process group, quick to start, under a hard time limit."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import queue
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from ddp_core.base.errors import ExitCode, UserError, first_line
from ddp_core.base.process import keep_freed_memory
from ddp_core.distributed.world import free_port
from ddp_lab.claims.measuring import namespaces

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "numpy",
    "ddp_core.distributed.process_group",
)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    device: str = "cpu",
    timeout: float = 120,
    own_nodes: bool = False,
    with_children: bool = False,
) -> list[Any]:
    """Run `function(rank, world_size, *arguments)` as `world_size` ranks; returns what each returned, by rank.

    `function` must stand at module level. Its process group (gloo, and nccl for `device` cuda) is there when it starts,
    and ends after it. One thread per rank on CPU. Results must be plain Python or numpy. With `own_nodes` each rank
    enters the namespace of that number, which must be there (`namespaces.joined`). A rank may start processes of its
    own only `with_children`, and has to end them. Raises UserError, naming the rank, where a rank fails or `timeout`
    seconds are over; leaves no process behind.
    """
    _CONTEXT.set_forkserver_preload(list(_PRELOAD))
    # torch reads this where it is imported, in the server. A node of its own has nobody to ask for names, and torch
    # warns of every name that it cannot find.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    port, results = free_port(), _CONTEXT.Queue()
    place = {
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": 1 if own_nodes else world_size,
        "MASTER_ADDR": namespaces.address(0) if own_nodes else "127.0.0.1",
        "MASTER_PORT": port,
    }
    workers = [
        _CONTEXT.Process(
            target=_enter,
            args=(function, rank, world_size, place, own_nodes, device, timeout, arguments, results),
            daemon=not with_children,
        )
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + timeout
    collected: dict[int, Any] = {}
    name = f"{function.__module__}.{function.__name__}"
    try:
        for worker in workers:
            worker.start()
        while len(collected) < world_size:
            try:
                rank, problem, value = results.get(timeout=min(1.0, max(0.01, deadline - time.monotonic())))
            except queue.Empty:
                missing = [rank for rank in range(world_size) if rank not in collected]
                dead = [rank for rank in missing if workers[rank].exitcode not in (None, 0)]
                if dead:
                    codes = [workers[rank].exitcode for rank in dead]
                    raise UserError(f"{name}: ranks {dead} died with {codes}", ExitCode.PEERS_LOST) from None
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{name}: ranks {missing} of {world_size} did not answer within {timeout:.0f} s",
                        ExitCode.PEERS_LOST,
                    ) from None
                continue
            if problem is not None:
                raise UserError(f"{name}: rank {rank} of {world_size}: {problem}")
            collected[rank] = value
        for worker in workers:
            worker.join(max(0.1, deadline - time.monotonic()))
    finally:
        for worker in workers:
            if worker.pid is not None and worker.is_alive():
                worker.kill()
            if worker.pid is not None:
                worker.join()
    return [collected[rank] for rank in range(world_size)]


def own_device(rank: int, device: str, keep_freed: bool = False) -> Any:
    """The torch.device of a rank on one node: `cpu`, or the CUDA device whose number is the rank.

    With `keep_freed` a process on the CPU keeps the memory that it frees, as a training run does.
    """
    import torch

    if keep_freed and device == "cpu":
        keep_freed_memory()
    return torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")


def _enter(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    place: dict[str, Any],
    own_node: bool,
    device: str,
    timeout: float,
    arguments: tuple[Any, ...],
    results: Any,
) -> None:
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update({name: str(value) for name, value in place.items()})
    node, local = (rank, 0) if own_node else (0, rank)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local), GROUP_RANK=str(node), OMP_NUM_THREADS="1")
    import torch

    from ddp_core.distributed.process_group import local_device, process_group
    from ddp_core.distributed.world import World

    torch.set_num_threads(1)
    try:
        if own_node:
            namespaces.enter(rank)
        world = World.from_environment()
        with process_group(world, local_device(world, device), timeout, even_alone=True):
            value = function(rank, world_size, *arguments)
        results.put((rank, None, value))
    except BaseException as error:
        first = first_line(error)
        results.put((rank, f"{type(error).__name__}: {first}", None))
