"""Start the workers of a request and see them to their end: with torchrun's agent, or with mp.spawn."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch.multiprocessing as mp

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.distributed.reports import first_telling, read_reports, write_launcher
from ddp_core.distributed.stop import (
    asking_signals,
    die_when_asked,
    ignores_afterwards,
    reason_of,
    stopped_outside,
)
from ddp_core.distributed.world import World, free_port
from ddp_core.experiment.request import Request
from ddp_core.launch.agreement import facts_of_nodes
from ddp_core.launch.nursery import Entry, Nursery
from ddp_core.record.directory import find_launch

if TYPE_CHECKING:
    from ddp_core.launch.node import Elastic


_INTERRUPTED = 128 + signal.SIGINT


@dataclass(frozen=True)
class Meeting:
    """Where the nodes of a launch meet, and how many there may be."""

    min_nodes: int = 1
    max_nodes: int = 1
    endpoint: str | None = None
    launch_id: str | None = None
    is_host: bool = False
    """Whether the nodes meet at this process, at the endpoint's port."""


def launch(request: Request, meeting: Meeting, entry: Entry) -> int:
    """Run the request in workers of this node; returns the exit code.

    A worker is `entry(words)`, where `words` is the path of a file with the request; where it is a fresh interpreter,
    it is `python -m PACKAGE` with the package of that function.
    """
    # This process only leaves afterwards.
    with (
        ignores_afterwards(*asking_signals(request.options.stop_signal), signal.SIGINT),
        TemporaryDirectory(prefix="ddp-") as scratch,
    ):
        file = Path(scratch) / "request.json"
        file.write_text(request.to_json(), encoding="utf-8")
        if request.options.launcher == "spawn":
            return _spawn(request, [str(file)], entry)
        return _run_elastic(request, meeting, [str(file)], entry)


def _run_elastic(request: Request, meeting: Meeting, arguments: Sequence[str], entry: Entry) -> int:
    """torchrun's agent: any number of nodes, and restarts."""
    from ddp_core.launch.node import Elastic

    launch_id = meeting.launch_id or f"ddp-{secrets.token_hex(8)}"
    settings = Elastic(
        meeting.min_nodes,
        meeting.max_nodes,
        request.layout.nproc_per_node,
        meeting.endpoint,
        launch_id,
        request.options.max_restarts,
        request.options.timeout,
        request.options.stop_signal,
        meeting.is_host,
        entry.__module__.rpartition(".")[0],
        facts_of_nodes(request),
    )
    try:
        with _nursery(request, entry) as nursery:
            code = _supervise(request, settings, arguments, nursery)
    except UserError as error:
        if error.exit_code == ExitCode.STOPPED and _is_completed(request, launch_id):
            return ExitCode.DONE
        _close_record(request, launch_id, error.exit_code)
        raise
    if code:
        _close_record(request, launch_id, code)
    return code


def _nursery(request: Request, entry: Entry) -> contextlib.AbstractContextManager[Nursery | None]:
    """On CPU alone: this process may have asked the CUDA driver what is there."""
    if request.layout.device == "cpu" and sys.platform == "linux":
        return Nursery(entry)
    return contextlib.nullcontext()


def _supervise(request: Request, settings: Elastic, arguments: Sequence[str], nursery: Nursery | None) -> int:
    """Start the agent again, a few times, when what it cannot survive is lost: the rendezvous.

    The agent itself starts lost workers again. Waits longer each time, about half a minute in all. Raises UserError
    when it is not to be had.
    """
    from ddp_core.launch.joining import RendezvousLost
    from ddp_core.launch.node import run_elastic

    pauses = [1.0, 2.0, 4.0, 8.0, 16.0] if settings.endpoint is not None and settings.max_restarts else []
    for pause in pauses:
        try:
            return run_elastic(settings, arguments, nursery)
        except RendezvousLost as lost:
            if _is_completed(request, settings.launch_id):
                return ExitCode.DONE
            print(f"ddp: {lost}; trying again in {pause:.0f} s", file=sys.stderr, flush=True)
        # What is left of the rendezvous has a thread, which must not be the one to clear it away, and perhaps a port.
        gc.collect()
        time.sleep(pause)
    try:
        return run_elastic(settings, arguments, nursery)
    except RendezvousLost as lost:
        raise UserError(
            f"{lost}: start `ddp rendezvous --port PORT` there (or the first node again, where that node serves it), "
            "or mend --rdzv-endpoint",
            lost.exit_code,
        ) from None


def _is_completed(request: Request, launch_id: str) -> bool:
    directory = find_launch(Path(request.options.output), request.loaded.experiment, launch_id)
    return directory is not None and directory.read()["status"] == "completed"


def _close_record(request: Request, launch_id: str, code: int) -> None:
    """Rank 0 may have died without a word: say so in its place."""
    directory = find_launch(Path(request.options.output), request.loaded.experiment, launch_id)
    if directory is not None and directory.read()["status"] == "running" and not directory.is_live:
        # Where the disk is full, what ended the launch has been said, and is its exit code.
        with contextlib.suppress(UserError):
            lost = code == ExitCode.PEERS_LOST
            message = "the workers were lost" if lost else f"the launch ended with exit code {int(code)}"
            status = "stopped" if code == ExitCode.STOPPED else "failed"
            directory.update(status=status, exit_code=int(code), message=message)


def _spawn(request: Request, arguments: Sequence[str], entry: Entry) -> int:
    """mp.spawn: this machine alone, no restarts."""
    count = request.layout.nproc_per_node
    heard = [*asking_signals(request.options.stop_signal), signal.SIGINT]
    with TemporaryDirectory(prefix="ddp-") as scratch:
        write_launcher(Path(scratch))
        logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)
        # It unblocks signals when it starts, so it starts before they are blocked.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
        context = mp.start_processes(
            _spawned,
            args=(entry, count, free_port(), scratch, list(arguments), mask),
            nprocs=count,
            join=False,
            start_method="spawn",
        )
        assert context is not None

        asked: list[int] = []

        def pass_on(number: int, _: object) -> None:
            impatient = number == signal.SIGINT in asked
            asked.append(number)
            for process in context.processes:
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, signal.SIGKILL if impatient else number)

        for number in heard:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            while not context.join():
                pass
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
            for process in context.processes:
                process.join()
            report = first_telling(read_reports(Path(scratch)))
            if report is not None:
                report.tell()
                return report.exit_code
            killed = getattr(error, "signal_name", None)
            if asked.count(signal.SIGINT) > 1 or killed == signal.SIGINT.name:
                print("ddp: interrupted", file=sys.stderr, flush=True)
                return _INTERRUPTED
            if killed in [number.name for number in heard]:
                # A worker that the signal could kill had not begun: it handles the signal then.
                raise stopped_outside(reason_of(signal.Signals[killed])) from None
            how = f"was killed ({killed})" if killed else "died"
            print(f"ddp: error: rank {error.error_index} {how}; continue with --resume auto", file=sys.stderr)
            return ExitCode.PEERS_LOST
    return ExitCode.DONE


def _spawned(
    rank: int,
    entry: Entry,
    count: int,
    port: int,
    reports: str,
    arguments: list[str],
    mask: set[signal.Signals],
) -> None:
    world = World(
        rank=rank,
        world_size=count,
        local_rank=rank,
        nproc_per_node=count,
        store_host="127.0.0.1",
        store_port=port,
        report_dir=Path(reports),
    )
    # A terminal's signals go to the launcher, which passes them on.
    os.setsid()
    # A request that came while this interpreter started takes effect now.
    die_when_asked()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.environ.update(world.to_environment())
    sys.exit(entry(arguments))
