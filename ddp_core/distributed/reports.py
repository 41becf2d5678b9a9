"""What a process and the one that has started it leave for each other: who that is, and how a worker has ended.

A launcher and its workers share a folder for this. A Python program that calls `ddp_core.train` starts `ddp train` with
two variables of the environment, so that the words of the command, which a run records, are those of any other run.
Nothing here loads torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ddp_core.base.ending import take_off_bar
from ddp_core.base.errors import ExitCode, UserError, in_words
from ddp_core.base.files import replace_file
from ddp_core.base.process import die_with_parent
from ddp_core.base.shown import shown
from ddp_core.distributed.stop import ASKED_ELSEWHERE
from ddp_core.distributed.world import World

_LAUNCHER = "launcher.pid"
_CALLER = "DDP_CALLER"
RUN_FILE = "DDP_RUN_FILE"
"""The variable with the file into which a training writes where its run directory is: see `tell_caller`."""


def tell_user(*texts: str) -> None:
    """Print each text as a line on standard error."""
    take_off_bar()
    for text in texts:
        print(f"ddp: {shown(text, lines=True)}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Report:
    """How a worker ended: the exit code, one line, and what is worth seeing of an exception's traceback."""

    rank: int
    node_rank: int
    exit_code: int
    message: str
    trace: str | None
    time: float

    def tell(self) -> None:
        """Print it on standard error."""
        if self.trace:
            sys.stderr.write(shown(self.trace, lines=True))
        tell_user(in_words(self.exit_code, self.message))


def report_end(world: World, exit_code: int, message: str, trace: str | None = None, says: bool = False) -> int:
    """Report how this worker ended to our launcher, or print it where there is none; returns the exit code.

    Rank 0 tells of a stop and of bad input, which all ranks meet alike; another rank only where the message names it,
    since it may be the only one to have met that, or where it `says` so.
    """
    report = Report(world.rank, world.node_rank, int(exit_code), message, trace, time.monotonic())
    if world.report_dir is None:
        is_alike = exit_code in (ExitCode.STOPPED, ExitCode.BAD_INPUT) and trace is None
        met_by_all = is_alike and world.place not in message
        if says or world.is_first or not met_by_all:
            report.tell()
    else:
        try:
            replace_file(world.report_dir / f"rank-{world.rank}.json", json.dumps(asdict(report)))
        except OSError:  # what ended this worker may be that nothing can be written
            report.tell()
        if exit_code == ExitCode.PEERS_LOST:
            # This worker has nothing to finish, and the launcher of its node waits for its end to start it again.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code)
    return int(exit_code)


def report_error(error: UserError) -> int:
    """Report an error from before the training began, as `run_worker` reports one; returns the exit code.

    All processes of a node have met it, since they have the same words and files: the first of them prints it.
    """
    try:
        world = World.from_environment()
    except UserError:
        world = World()  # the launcher's variables are wrong themselves: print the error here
    return report_end(world, error.exit_code, str(error), says=world.local_rank == 0)


def read_reports(directory: Path) -> list[Report]:
    """The workers' reports, the most telling first: causes before their consequences, and then the earliest."""
    reports = [Report(**json.loads(file.read_text())) for file in directory.glob("*.json")]
    reports.sort(key=lambda report: report.time)
    # A sort leaves equal ones in their order.
    return sorted(reports, key=lambda each: each.exit_code == ExitCode.PEERS_LOST or ASKED_ELSEWHERE in each.message)


def clear_reports(directory: Path) -> None:
    """Remove the reports of the round before: the workers start again."""
    for file in directory.glob("*.json"):
        file.unlink()


def write_launcher(directory: Path, *others: int) -> None:
    """Write, beside the reports, which processes may be the parent of a worker: this process, and `others`."""
    (directory / _LAUNCHER).write_text(" ".join(str(pid) for pid in (os.getpid(), *others)))


def die_with_launcher(directory: Path) -> None:
    """Have the kernel kill this worker when its parent process ends, for whatever reason."""
    file = directory / _LAUNCHER
    parents = file.read_text().split() if file.exists() else []
    # The launcher may have died while this worker was still loading; another process is the parent then.
    die_with_parent()
    if str(os.getppid()) not in parents:
        os._exit(ExitCode.PEERS_LOST)


def caller_variables(run_file: Path) -> dict[str, str]:
    """The variables by which a `ddp train` that this process starts knows its caller.

    `run_file`: where it shall write the path of its run directory.
    """
    return {_CALLER: str(os.getpid()), RUN_FILE: str(run_file)}


def without_caller(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables without those that make a process known to the caller of this one."""
    return {name: value for name, value in environ.items() if name not in (_CALLER, RUN_FILE)}


def stop_with_caller() -> None:
    """Have the kernel ask this process to save and stop (SIGTERM) when its caller dies; does nothing without a caller.

    Nobody would see it train on. For the process that the caller started, and not for workers, which end with their
    launcher.
    """
    if os.environ.get(_CALLER) == str(os.getppid()):
        die_with_parent(signal.SIGTERM)


def tell_caller(directory: Path) -> None:
    """Tell the caller where the run directory is, as an absolute path; does nothing without a caller."""
    if run_file := os.environ.get(RUN_FILE):
        # A caller that is ending may have removed the file's folder already.
        with contextlib.suppress(OSError):
            replace_file(Path(run_file), str(directory.absolute()))
