"""Trains one case on every layout, each process a fork of one that has torch and the case's packages loaded.

The processes are real: each has what a launcher sets, and runs `ddp train` itself. What is spared is the launcher and
the import of torch, five seconds of processor time each, which 300 cases on eight layouts would pay 5,000 times.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ddp_core.base.errors import ExitCode
from ddp_core.base.process import die_with_parent
from ddp_core.base.torch_internals import LOADED_BY_OPTIMIZERS
from ddp_core.distributed.world import free_port
from ddp_core.record.directory import find_runs
from tests.foreign.fleet import GROUPS, Case

Outcome = Literal["identical", "refused", "warned", "SILENT", "FAULT", "HANG", "not tried"]
"""identical: the weights, their average and the optimizer's state of `single`. refused: a line that says why, and exit
code 2 or 5. warned: other bits, and a warning that said so. SILENT: other bits, and nothing said. FAULT: any other end.
HANG: none within the time. not tried: `single` ended badly."""

SECONDS, SECONDS_LARGE = 150, 600
"""How long one layout may take."""
_FORK = multiprocessing.get_context("fork")
_LOADED = (LOADED_BY_OPTIMIZERS, "torch.nn.parallel", "ddp_core.cli", "ddp_core.run.run", "ddp_core.cli.prepare")


@dataclass(frozen=True)
class Way:
    """A layout: how many processes, and the words that ask for it."""

    processes: int
    words: tuple[str, ...]


def _ddp(count: int, *more: str) -> Way:
    return Way(count, ("--layout", "ddp", "--nproc-per-node", str(count), *more))


WAYS: dict[str, Way] = {
    "single": Way(1, ("--layout", "single")),
    "dp x 2": Way(1, ("--layout", "dp", "--nproc-per-node", "2")),
    "ddp x 2": _ddp(2),
    "ddp x 2, strict": _ddp(2, "--guard", "strict"),
    "ddp x 3": _ddp(3),
    "shard optimizer": _ddp(2, "--shard", "optimizer"),
    "shard gradients": _ddp(2, "--shard", "gradients"),
    "shard parameters": _ddp(2, "--shard", "parameters"),
}
KILLED = "killed, resumed"
"""The last column: killed after step 1 on ddp x 2, and resumed on a layout that differs from case to case."""
COLUMNS = (*WAYS, KILLED)
RESUMED_ON = ("single", "dp x 2", "ddp x 3")


@dataclass
class Ended:
    """How the processes of one layout ended: the worst code, what they said, and the digests of the result."""

    code: int | None
    said: str
    digests: tuple[str | None, ...] | None = None


def load(groups: Sequence[str]) -> None:
    """Load what the cases of these groups need. Nothing is computed: a process that has must not fork trainers."""
    import torch

    torch.set_num_threads(1)
    from ddp_core.base.torchvision_import import import_torchvision

    import_torchvision()
    for name in (*_LOADED, *{package for group in groups for package in GROUPS[group]}):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def run(case: Case, ways: Sequence[str] = COLUMNS) -> dict[str, Any]:
    """Train the case on these layouts, `single` first; return the outcomes, and what was said where one is not good."""
    with tempfile.TemporaryDirectory(prefix="ddp-foreign-") as scratch:
        return _run(case, ways, Path(scratch))


def _run(case: Case, ways: Sequence[str], scratch: Path) -> dict[str, Any]:
    began = time.monotonic()
    _import_for(case)
    outcomes: dict[str, str] = {}
    said: dict[str, str] = {}
    alone = _train(case, WAYS["single"], scratch / "single")
    for way in ways:
        if way == "single":
            ended = alone
        elif alone.code not in (ExitCode.DONE, ExitCode.BAD_INPUT, ExitCode.NUMERICS):
            outcomes[way] = "not tried"
            continue
        elif way == KILLED:
            ended = _kill_and_resume(case, scratch / "killed")
        else:
            ended = _train(case, WAYS[way], scratch / str(len(outcomes)))
        outcomes[way] = judge(ended, alone)
        if outcomes[way] != "identical":
            said[way] = ended.said[-1500:] if outcomes[way] in ("SILENT", "FAULT", "HANG") else one_line(ended.said)
    on = {KILLED: resumed_on(case)} if KILLED in ways else {}
    return {"outcomes": outcomes, "said": said, "on": on, "seconds": round(time.monotonic() - began, 1)}


def judge(ended: Ended, alone: Ended) -> Outcome:
    """What the end of a layout means beside that of `single`."""
    if ended.code is None:
        return "HANG"
    if ended.code in (ExitCode.BAD_INPUT, ExitCode.NUMERICS):
        return "refused"
    if ended.code != ExitCode.DONE or ended.digests is None:
        return "FAULT"
    if ended.digests == alone.digests:
        return "identical"
    return "warned" if "other bits" in ended.said else "SILENT"


def one_line(said: str) -> str:
    """The line that a user is told last, without the path of this machine."""
    lines = [line for line in said.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("error:", "ddp: error:"))]
    line = (told or lines or ["nothing was said"])[-1]
    return line.replace("ddp: ", "", 1).replace(str(Path.cwd()) + "/", "").strip()[:600]


def resumed_on(case: Case) -> str:
    """The layout on which the killed run of this case goes on: another one for each third case."""
    return RESUMED_ON[zlib.crc32(case.key.encode()) % len(RESUMED_ON)]


def _kill_and_resume(case: Case, output: Path) -> Ended:
    saving = ("--checkpoint-every", "1", "--synchronous-save")
    killed = _train(case, WAYS["ddp x 2"], output, *saving, "--fault", "kill@1:0")
    if killed.code not in (-signal.SIGKILL, None):
        return killed
    return _train(case, WAYS[resumed_on(case)], output, *saving, "--resume", "auto")


def _train(case: Case, way: Way, output: Path, *more: str) -> Ended:
    ended = _try_to_train(case, way, output, *more)
    if ended.code == ExitCode.RESOURCES and "is in use" in ended.said:
        return _try_to_train(case, way, output, *more)  # the port was free, and is taken by now
    return ended


def _try_to_train(case: Case, way: Way, output: Path, *more: str) -> Ended:
    output.mkdir(exist_ok=True)
    words = ["train", *case.words, *way.words, "--device", "cpu", "--output", str(output), "--log-every", "1", *more]
    port, logs = free_port(), [output / f"log-{rank}.txt" for rank in range(way.processes)]
    ranks = [
        _FORK.Process(target=_enter, args=(words, _variables(rank, way.processes, port), log))
        for rank, log in enumerate(logs)
    ]
    for each in ranks:
        each.start()
    deadline = time.monotonic() + (SECONDS_LARGE if case.is_large else SECONDS)
    for each in ranks:
        each.join(max(0.0, deadline - time.monotonic()))
    hangs = [number for number, each in enumerate(ranks) if each.exitcode is None]
    for each in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.pid or 0, signal.SIGKILL)
        each.join()
    codes = [each.exitcode for each in ranks]
    worst = max(range(len(codes)), key=lambda rank: _badness(codes[rank]))
    # Of ranks that end alike, one alone may say why.
    alike = [log.read_text(errors="replace") for rank, log in enumerate(logs) if codes[rank] == codes[worst]]
    text = next((said for said in alike if "error: " in said), alike[0])
    if hangs and not any(code == -signal.SIGKILL for rank, code in enumerate(codes) if rank not in hangs):
        return Ended(None, f"ranks {hangs} did not end\n{logs[hangs[0]].read_text(errors='replace')}")
    records = [record for _, record in find_runs(output)]
    digests = None
    if len(records) == 1 and "weights_sha256" in records[0]:
        digests = tuple(records[0][f"{part}_sha256"] for part in ("weights", "optimizer", "ema"))
    return Ended(codes[worst], text, digests)


def _badness(code: int | None) -> int:
    """The rank that knows why comes first: a fault before a refusal, both before a peer that was lost."""
    order = (ExitCode.DONE, ExitCode.PEERS_LOST, ExitCode.NUMERICS, ExitCode.BAD_INPUT)
    return order.index(ExitCode(code)) if code in order else len(order)


def _variables(rank: int, processes: int, port: int) -> dict[str, str]:
    common = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if processes == 1:
        return common
    return common | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _enter(words: list[str], variables: dict[str, str], log: Path) -> None:
    # Of its own group, so that whatever it starts ends with it.
    os.setsid()
    die_with_parent()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(variables)
    from ddp_core.cli import main

    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def _import_for(case: Case) -> None:
    """Import what the case's own model is made of, once for all its processes."""
    if case.group == "transformers":
        from tests.foreign.experiments.transformers_tiny import configuration

        task = case.settings[0].partition("=")[2]
        configuration(task, case.name)
        gc.freeze()
