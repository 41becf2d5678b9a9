"""One worker process: runs its part, and turns whatever happens into an exit code and one report."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ddp_core.distributed.stop import ASKED_ELSEWHERE
from ddp_core.distributed.world import World
from ddp_core.errors import ExitCode, UserError, in_words
from ddp_core.files import replace_file
from ddp_core.observe.lost_peers import is_peer_loss, reason_of
from ddp_core.orphans import die_with_parent
from ddp_core.run.blame import shortage, unforeseen
from ddp_core.run.request import Request
from ddp_core.run.run import run

_LAUNCHER = "launcher.pid"


@dataclass(frozen=True)
class Report:
    """How a worker ended: the exit code, one line, and the traceback where there is one worth seeing."""

    rank: int
    node_rank: int
    exit_code: int
    message: str
    trace: str | None
    time: float

    def tell(self) -> None:
        """Say it on standard error."""
        if self.trace:
            sys.stderr.write(self.trace)
        print(f"ddp: {in_words(self.exit_code, self.message)}", file=sys.stderr, flush=True)


def run_worker(request: Request, world: World) -> int:
    """Run one worker to its end, and return its exit code.

    How it ended is written to a report for the launcher, or printed where there is no launcher of ours.
    """
    if world.report_dir is not None:
        _die_with_launcher(world.report_dir)
    try:
        run(request, world)
    except UserError as error:
        return _report(world, error.exit_code, str(error))
    except Exception as error:
        if is_peer_loss(error):
            return _report(world, ExitCode.PEERS_LOST, f"{world.place} lost a peer: {reason_of(error)}")
        if known := shortage(error, world.place, Path(request.options.output)):
            return _report(world, known.exit_code, str(known))
        exit_code, message = unforeseen(error)
        return _report(world, exit_code, f"{world.place}: {message}", traceback.format_exc())
    return ExitCode.DONE


def report_error(error: UserError) -> int:
    """Report an error from before the training began, as `run_worker` reports one; returns the exit code."""
    try:
        world = World.from_environment()
    except UserError:
        world = World()  # the launcher's variables are wrong themselves: print the error here
    return _report(world, error.exit_code, str(error))


def read_reports(directory: Path) -> list[Report]:
    """The workers' reports, the most telling first: a cause before its consequences, then the earliest."""
    reports = [Report(**json.loads(file.read_text())) for file in directory.glob("*.json")]
    return sorted(reports, key=lambda report: (_is_consequence(report), report.time))


def _is_consequence(report: Report) -> bool:
    return report.exit_code == ExitCode.PEERS_LOST or ASKED_ELSEWHERE in report.message


def clear_reports(directory: Path) -> None:
    """Remove the reports of the round before: the workers start again."""
    for file in directory.glob("*.json"):
        file.unlink()


def first_telling(reports: Iterable[Report]) -> Report | None:
    """The first of sorted reports, None if there is none."""
    return next(iter(reports), None)


def _report(world: World, exit_code: int, message: str, trace: str | None = None) -> int:
    report = Report(world.rank, world.node_rank, int(exit_code), message, trace, time.time())
    if world.report_dir is None:
        if world.is_first or exit_code not in (ExitCode.STOPPED, ExitCode.BAD_INPUT) or trace:
            report.tell()
    else:
        replace_file(world.report_dir / f"rank-{world.rank}.json", json.dumps(asdict(report)))
        if exit_code == ExitCode.PEERS_LOST:
            # This worker has nothing to finish, and the launcher of its node waits for its end to start it again.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code)
    return int(exit_code)


def write_launcher(directory: Path, *others: int) -> None:
    """Write, beside the reports, which processes may be the parent of a worker: this process, and `others`."""
    (directory / _LAUNCHER).write_text(" ".join(str(pid) for pid in (os.getpid(), *others)))


def _die_with_launcher(directory: Path) -> None:
    """Have the kernel kill this worker when its parent process ends, for whatever reason."""
    parents = (
        [int(pid) for pid in (directory / _LAUNCHER).read_text().split()] if (directory / _LAUNCHER).exists() else []
    )
    # The launcher may have died while this worker was still loading; another process is the parent then.
    die_with_parent()
    if os.getppid() not in parents:
        os._exit(ExitCode.PEERS_LOST)
