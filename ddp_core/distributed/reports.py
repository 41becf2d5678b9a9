"""What a launcher and its workers leave for each other in one folder: who the launcher is, and how each worker ended.

Torch need not be loaded for it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ddp_core.base.errors import ExitCode, UserError, in_words
from ddp_core.base.files import replace_file
from ddp_core.base.process import die_with_parent
from ddp_core.distributed.stop import ASKED_ELSEWHERE
from ddp_core.distributed.world import World

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


def report_end(world: World, exit_code: int, message: str, trace: str | None = None) -> int:
    """Write how this worker ended for its launcher, or print it where there is none of ours; returns the exit code."""
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


def report_error(error: UserError) -> int:
    """Report an error from before the training began, as `run_worker` reports one; returns the exit code."""
    try:
        world = World.from_environment()
    except UserError:
        world = World()  # the launcher's variables are wrong themselves: print the error here
    return report_end(world, error.exit_code, str(error))


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


def write_launcher(directory: Path, *others: int) -> None:
    """Write, beside the reports, which processes may be the parent of a worker: this process, and `others`."""
    (directory / _LAUNCHER).write_text(" ".join(str(pid) for pid in (os.getpid(), *others)))


def die_with_launcher(directory: Path) -> None:
    """Have the kernel kill this worker when its parent process ends, for whatever reason."""
    parents = (
        [int(pid) for pid in (directory / _LAUNCHER).read_text().split()] if (directory / _LAUNCHER).exists() else []
    )
    # The launcher may have died while this worker was still loading; another process is the parent then.
    die_with_parent()
    if os.getppid() not in parents:
        os._exit(ExitCode.PEERS_LOST)
