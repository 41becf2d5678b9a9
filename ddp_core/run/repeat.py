"""Trains steps of a request again, elsewhere: in fresh processes, on a layout, from the beginning or a checkpoint.

The promise is that this gives the same bits. So whatever vouches for a run is one call of `start` for each training,
and a comparison of what the trainings have noted after each step.

The processes are forked from the one that calls, which must have neither threads nor a device nor a process group. With
GPUs each is a fresh interpreter where the experiment's code has started CUDA, which does not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from ddp_core.base import cuda_driver
from ddp_core.base.errors import ExitCode
from ddp_core.base.process import die_with_parent
from ddp_core.config.layout import Layout
from ddp_core.distributed.children import error_of
from ddp_core.distributed.reports import without_caller
from ddp_core.distributed.world import World, free_port, without_launch
from ddp_core.experiment.request import Request
from ddp_core.record.directory import find_runs
from ddp_core.trainers.job import Sums
from ddp_core.trainers.noting import first_other, read_notes

_LIMIT = 600.0
"""Seconds that a training may take, so that one that hangs ends with a line."""
_FORK = multiprocessing.get_context("fork")
_POLL_SECONDS = 0.01
_CONSEQUENCE_SECONDS = 5.0
"""What ranks have for a message of their own once one of them has failed."""
_OWN_WAY = {
    **{"guard": "off", "rehearsal": "off", "recovery": "restart", "launcher": "external", "max_restarts": 0},
    **{"faults": (), "log_to": (), "profile": None, "keep_for_audit": None, "keep_every": None},
    **{"max_seconds": None, "stop_signal": None, "digest_every": None, "asynchronous_save": False, "log_every": 1},
}
"""Options that a repetition has in its own way; none of them may change a bit."""


@dataclass(frozen=True)
class Repeated:
    """What became of a repetition."""

    code: int
    """0 where it has come to its end."""
    said: str
    """The error that the first rank that failed has told; empty where none has failed."""
    sums: Sequence[Mapping[int, Sums]]
    """By rank, what each step has made of the state, by the number of steps done."""


def other_bits(single: Repeated, other: Repeated) -> tuple[int, list[str]] | None:
    """The first step in which any rank of `other` has something else than the one process, and the names of it."""
    by_rank = [first_other(single.sums[0], sums, is_part=rank > 0) for rank, sums in enumerate(other.sums)]
    found = [each for each in by_rank if each is not None]
    return min(found, key=lambda each: each[0], default=None)


def elsewhere(request: Request, layout: Layout, folder: Path, asked: Mapping[str, Any], **options: Any) -> Request:
    """The request, trained on `layout` with its output below `folder`; `asked` and `options` change fields of both."""
    changed: dict[str, Any] = {**_OWN_WAY, "output": str(folder / "runs"), **options}
    if layout.kind == "dp":
        changed["cuda_graph"] = False  # its threads cannot record one
    whole = {"noted_in": str(folder / "notes"), **asked}
    return replace(
        request,
        layout=layout,
        options=request.options.model_copy(update=changed),
        resume=str(asked.get("resume", "never")),
        asked=request.asked.model_copy(update=whole),
        rehearsed=None,
    )


class Training:
    """Ranks of a request that train on this machine; `wait` for them. What still trains at the end of a block is ended.

    `folder` is theirs alone: it gets the request, what each rank prints, the notes and the run directory.
    """

    def __init__(self, request: Request, folder: Path) -> None:
        self._folder, ranks = folder, request.layout.world_size
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "request.json"
        file.write_text(request.to_json(), encoding="utf-8")
        start = _interpreter if request.layout.device == "cuda" and cuda_driver.is_started() else _fork
        is_rank = ranks > 1 or request.layout.kind == "ddp"
        port = free_port() if ranks > 1 else None
        self._processes: list[subprocess.Popen[bytes] | multiprocessing.process.BaseProcess] = []
        for rank in range(ranks):
            world = World(rank, ranks, rank, ranks, store_host="127.0.0.1" if port else None, store_port=port)
            # One process of its own has a world of 1.
            place = (world if is_rank else World()).to_environment()
            environment = {**without_caller(without_launch(os.environ)), **place}
            self._processes.append(start([str(file)], environment, folder / f"rank-{rank}.log"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        while None in self._codes():
            time.sleep(_POLL_SECONDS)

    def wait(self) -> Repeated:
        """What became of them; those that run on for too long, or when one has failed, are ended."""
        deadline = time.monotonic() + _LIMIT
        with self:
            while None in (codes := self._codes()) and time.monotonic() < deadline:
                if any(codes):
                    deadline = min(deadline, time.monotonic() + _CONSEQUENCE_SECONDS)
                time.sleep(_POLL_SECONDS)
        # A rank that has lost another one tells of a consequence.
        failed = sorted((code == ExitCode.PEERS_LOST, rank) for rank, code in enumerate(codes) if code)
        code, said = ExitCode.DONE.value, ""
        if failed:
            rank = failed[0][1]
            code, log = int(codes[rank] or 0), self._folder / f"rank-{rank}.log"
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
            said = str(error_of(code, lines))
        elif None in codes:
            code, said = ExitCode.PEERS_LOST.value, f"it has not ended within {_LIMIT:.0f} s"
        ranks = range(len(self._processes))
        return Repeated(code, said, [read_notes(self._folder / "notes", rank) for rank in ranks])

    def _codes(self) -> list[int | None]:
        return [each.poll() if isinstance(each, subprocess.Popen) else each.exitcode for each in self._processes]


def _interpreter(words: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "ddp_core.run", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )


def _fork(words: Sequence[str], environment: Mapping[str, str], log: Path) -> multiprocessing.process.BaseProcess:
    process = _FORK.Process(target=_work, args=(words, environment, log))
    process.start()
    return process


def _work(words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    from ddp_core.run.run import worker_main

    os.setsid()
    die_with_parent()
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        os._exit(ExitCode.PEERS_LOST)  # it ended before the kernel was told
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    with log.open("wb") as output, open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    run: Callable[[Sequence[str]], int] = worker_main
    sys.exit(run(words))


@dataclass(frozen=True)
class Miniature:
    """The request in miniature."""

    request: Request
    killed_after: int
    """The step after which a training is killed, within the second epoch where there is one; 0: too short for that."""

    @classmethod
    def of(cls, request: Request, samples: int) -> Self:
        """That of a request whose data have so many samples to train."""
        small = request.loaded.experiment.in_miniature()
        each = small.steps_per_epoch(small.samples_in_miniature(samples))
        killed_after = min(each + 2, small.total_steps(each) - 1)
        loaded = replace(request.loaded, experiment=small)
        return cls(replace(request, loaded=loaded), killed_after if killed_after > 1 else 0)

    def training(
        self, layout: Layout, folder: Path, asked: Mapping[str, Any] | None = None, **options: Any
    ) -> Training:
        """Begin to train it, by default from the beginning; `asked` and `options` as for `elsewhere`."""
        given = {"miniature": True, "fork": None, "at": None, **(asked or {})}
        return Training(elsewhere(self.request, layout, folder, given, **options), folder)

    def killed_and_resumed(self, layout: Layout, folder: Path) -> Repeated:
        """Train it on the layout, where all ranks are killed and begin anew with the checkpoint of the step before."""
        if not self.killed_after:
            return self.training(layout, folder).wait()
        kill, every = (f"kill@{self.killed_after}",), self.killed_after - 1
        before = self.training(layout, folder, faults=kill, checkpoint_every=every).wait()
        run = next((found.path for found, _ in find_runs(folder / "runs")), None)
        if run is None or max(before.sums[0], default=0) < self.killed_after:
            return before if before.code else replace(before, code=int(ExitCode.INTERNAL), said="it was not killed")
        again = folder / "resumed"
        after = self.training(layout, again, {"resume": str(run)}, checkpoint_every=every).wait()
        # The step before the kill is noted twice; the later note counts, which a resume has made.
        sums = [{**one, **other} for one, other in zip(before.sums, after.sums, strict=True)]
        return Repeated(after.code, after.said, sums)
