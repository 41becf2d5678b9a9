"""One worker process: runs its part of a request, and turns whatever happens into an exit code and one report."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path

from ddp_core.base.determinism import use_chosen_threads
from ddp_core.base.errors import ExitCode, UserError, said_by
from ddp_core.base.process import make_patient
from ddp_core.distributed.reports import die_with_launcher, report_end, report_error
from ddp_core.distributed.world import World
from ddp_core.experiment.blame import shortage, unforeseen
from ddp_core.experiment.request import Request
from ddp_core.observe.lost_peers import is_peer_loss, reason_of
from ddp_core.run.run import run


@said_by("ddp")
def main(words: Sequence[str]) -> int:
    """Carry out a launcher's request as the worker that the launcher's variables say; returns the exit code.

    `words`: the path of a file with the request (`Request.to_json`).
    """
    (file,) = words
    make_patient()
    use_chosen_threads()
    try:
        world = World.from_environment()
        if world.report_dir is not None:
            die_with_launcher(world.report_dir)
        request = Request.from_json(Path(file).read_text(encoding="utf-8")).for_nodes(world.nnodes)
    except UserError as error:
        return report_error(error)
    return run_worker(request, world)


def run_worker(request: Request, world: World) -> int:
    """Run one worker to its end, and return its exit code.

    How it ended is written to a report for the launcher, or printed where there is no launcher of ours.
    """
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
