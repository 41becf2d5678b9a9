"""Ranks as forks of a process that has torch loaded, which spares them the launcher and the import of torch.

The processes are real: each has what a launcher sets, and runs `ddp` itself. Their number is that of the launch.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_core.base.errors import ExitCode
from ddp_core.base.process import die_with_parent
from ddp_core.distributed.world import free_port

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
    ended = _launch(words, ranks, folder, seconds, main, variables or {})
    if ended.code == ExitCode.RESOURCES and "is in use" in ended.said:
        # The port was free, and is taken by now.
        return _launch(words, ranks, folder, seconds, main, variables or {})
    return ended


def _launch(
    words: Sequence[str], ranks: int, folder: Path, seconds: float, main: Main, variables: Mapping[str, str]
) -> Ended:
    folder.mkdir(exist_ok=True)
    port, logs = free_port(), [folder / f"log-{rank}.txt" for rank in range(max(ranks, 1))]
    processes = [
        _FORK.Process(target=_enter, args=(main, list(words), _variables(rank, ranks, port) | dict(variables), log))
        for rank, log in enumerate(logs)
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


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    common = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if not ranks:
        return common
    return common | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _enter(main: Main, words: list[str], variables: dict[str, str], log: Path) -> None:
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
