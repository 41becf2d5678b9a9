"""Real worker processes for tests: quick to start (torch is loaded once), with a hard timeout, never left behind.

`run_processes` calls a function as several ranks, in forks of a server. `launch` forks this very process, which has
called `load`, and runs a whole command as the ranks of an outside launcher.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ddp_core.base.errors import ExitCode
from ddp_core.base.process import die_with_parent
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
        *("ddp_core.cli.evaluate", "ddp_core.cli.bundle", "ddp_core.cli.audit"),
        *("ddp_core.launch.launch", "ddp_core.run.run", "ddp_core.data.builders", "ddp_core.model.builders"),
        *("ddp_core.trainers.data_parallel", "ddp_core.trainers.distributed"),
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


def _launchers(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that a launcher sets for a rank on one machine."""
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), world_size) | {"GROUP_WORLD_SIZE": 1}
    places = dict.fromkeys(("RANK", "LOCAL_RANK"), rank) | {"GROUP_RANK": 0, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in (sizes | places).items()}


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
    os.environ.update(_launchers(rank, world_size, port), OMP_NUM_THREADS="1")
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


_FORK = multiprocessing.get_context("fork")
_LOADED = ("torch.nn.parallel", "ddp_core.cli", "ddp_core.run.run", "ddp_core.cli.prepare")

Main = Callable[[Sequence[str]], int]


@dataclass(frozen=True)
class Ended:
    """How the processes of a launch ended: the worst code (None: not within the time), and what was said of it."""

    code: int | None
    said: str


def load(packages: Sequence[str] = ()) -> None:
    """Load what a rank needs, and more. Nothing is computed: a process that has must not fork trainers."""
    import torch

    torch.set_num_threads(1)
    from ddp_core.base.torchvision_import import import_torchvision

    import_torchvision()
    from ddp_core.model.optimizers import load_for_optimizers

    load_for_optimizers()
    for name in (*_LOADED, *packages):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def ddp(words: Sequence[str]) -> int:
    """`ddp WORDS`, for `launch`."""
    from ddp_core.cli import main

    return main(words)


def launch(
    words: Sequence[str],
    ranks: int,
    folder: Path,
    seconds: float,
    main: Main = ddp,
    variables: Mapping[str, str] | None = None,
) -> Ended:
    """Run `main(words)` as so many ranks of an outside launcher, or without a launcher where `ranks` is 0.

    What they say is kept in `folder`. After `seconds` they are killed.
    """
    for _ in range(2):
        ended = _launch(words, ranks, folder, seconds, main, dict(variables or {}))
        if ended.code != ExitCode.RESOURCES or "is in use" not in ended.said:
            break  # else the port was free, and is taken by now
    return ended


def _launch(
    words: Sequence[str], ranks: int, folder: Path, seconds: float, main: Main, variables: dict[str, str]
) -> Ended:
    folder.mkdir(exist_ok=True)
    port, logs = free_port(), [folder / f"log-{rank}.txt" for rank in range(max(ranks, 1))]
    common = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    settings = [common | (_launchers(rank, ranks, port) if ranks else {}) | variables for rank in range(len(logs))]
    processes = [
        _FORK.Process(target=_become, args=(main, list(words), each, log))
        for each, log in zip(settings, logs, strict=True)
    ]
    for each in processes:
        each.start()
    deadline = time.monotonic() + seconds
    for each in processes:
        each.join(max(0.0, deadline - time.monotonic()))
    hangs = [number for number, each in enumerate(processes) if each.exitcode is None]
    for each in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.pid or 0, signal.SIGKILL)
        each.join()
    codes = [each.exitcode for each in processes]
    worst = max(range(len(codes)), key=lambda rank: _badness(codes[rank]))
    # Of ranks that end alike, one alone may say why.
    alike = [_text(log) for rank, log in enumerate(logs) if codes[rank] == codes[worst]]
    if hangs and not any(code == -signal.SIGKILL for rank, code in enumerate(codes) if rank not in hangs):
        return Ended(None, f"ranks {hangs} did not end within {seconds:.0f} s\n{_text(logs[hangs[0]])}")
    return Ended(codes[worst], next((said for said in alike if "error: " in said), alike[0]))


def _text(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


def _badness(code: int | None) -> int:
    """The rank that knows why comes first: a fault before a refusal, both before a peer that was lost."""
    order = (ExitCode.DONE, ExitCode.PEERS_LOST, ExitCode.NUMERICS, ExitCode.BAD_INPUT)
    return order.index(ExitCode(code)) if code in order else len(order)


def _become(main: Main, words: list[str], variables: dict[str, str], log: Path) -> None:
    # Of its own group, so that whatever it starts ends with it.
    os.setsid()
    die_with_parent()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(variables)
    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
