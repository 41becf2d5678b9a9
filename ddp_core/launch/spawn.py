"""Starts the workers of a request with mp.spawn, on this machine alone and without restarts."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.multiprocessing as mp

from ddp_core.base.errors import ExitCode
from ddp_core.distributed.reports import read_reports, tell_user, write_launcher
from ddp_core.distributed.stop import asking_signals, describe_signal, die_when_asked, stopped_untrained
from ddp_core.distributed.world import World, free_port
from ddp_core.experiment.request import Request
from ddp_core.launch.nursery import Entry


def spawn(request: Request, words: Sequence[str], entry: Entry, launch_id: str) -> int:
    """Run `entry(words)` in each worker; returns the exit code. The run's record holds `launch_id`.

    Raises UserError (75) where a signal that asks to stop came before the workers handled it.
    """
    count = request.layout.nproc_per_node
    heard = [*asking_signals(request.options.stop_signal), signal.SIGINT]
    with TemporaryDirectory(prefix="ddp-", ignore_cleanup_errors=True) as scratch:
        write_launcher(Path(scratch))
        logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)
        # The tracker unblocks signals when it starts, so it starts before they are blocked.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
        context = mp.start_processes(
            _work,
            args=(entry, count, free_port(), scratch, list(words), mask, launch_id),
            nprocs=count,
            join=False,
            start_method="spawn",
        )
        assert context is not None

        asked: list[int] = []

        def pass_on(number: int, _: object) -> None:
            # A user who presses Ctrl-C again does not want to wait.
            is_second_interrupt = number == signal.SIGINT and signal.SIGINT in asked
            asked.append(number)
            for process in context.processes:
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, signal.SIGKILL if is_second_interrupt else number)

        for number in heard:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            while not context.join():
                pass
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
            for process in context.processes:
                process.join()
            if reports := read_reports(Path(scratch)):
                reports[0].tell()
                return reports[0].exit_code
            killed = getattr(error, "signal_name", None)
            if asked.count(signal.SIGINT) > 1 or killed == signal.SIGINT.name:
                tell_user("interrupted")
                return 128 + signal.SIGINT
            if killed in [number.name for number in heard]:
                # The signal can kill a worker only before it has begun: later the worker handles it.
                raise stopped_untrained(describe_signal(signal.Signals[killed])) from None
            how = f"was killed ({killed})" if killed else "died"
            tell_user(f"error: rank {error.error_index} {how}; continue with --resume auto")
            return ExitCode.PEERS_LOST
    return ExitCode.DONE


def _work(
    rank: int,
    entry: Entry,
    count: int,
    port: int,
    reports: str,
    words: list[str],
    mask: set[signal.Signals],
    launch_id: str,
) -> None:
    world = World(
        rank=rank,
        world_size=count,
        local_rank=rank,
        nproc_per_node=count,
        store_host="127.0.0.1",
        store_port=port,
        report_dir=Path(reports),
        launch_id=launch_id,
    )
    # A terminal's signals go to the launcher, which passes them on.
    os.setsid()
    # A request to stop that came while this interpreter started takes effect now.
    die_when_asked()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.environ.update(world.to_environment())
    sys.exit(entry(words))
