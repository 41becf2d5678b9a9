"""One worker process: runs its part, and turns whatever happens into an exit code and one report."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

from ddp_core.distributed.world import World
from ddp_core.errors import ExitCode, UserError
from ddp_core.launch.reports import report_end
from ddp_core.observe.lost_peers import is_peer_loss, reason_of
from ddp_core.orphans import die_with_parent
from ddp_core.run.blame import shortage, unforeseen
from ddp_core.run.request import Request
from ddp_core.run.run import run

_LAUNCHER = "launcher.pid"


def run_worker(request: Request, world: World) -> int:
    """Run one worker to its end, and return its exit code.

    How it ended is written to a report for the launcher, or printed where there is no launcher of ours.
    """
    if world.report_dir is not None:
        _die_with_launcher(world.report_dir)
    try:
        run(request, world)
    except UserError as error:
        return report_end(world, error.exit_code, str(error))
    except Exception as error:
        if is_peer_loss(error):
            return report_end(world, ExitCode.PEERS_LOST, f"{world.place} lost a peer: {reason_of(error)}")
        if known := shortage(error, world.place, Path(request.options.output)):
            return report_end(world, known.exit_code, str(known))
        exit_code, message = unforeseen(error)
        return report_end(world, exit_code, f"{world.place}: {message}", traceback.format_exc())
    return ExitCode.DONE


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
