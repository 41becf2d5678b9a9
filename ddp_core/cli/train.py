"""`ddp train`: from what was asked to one request, and on to this process's own work or to a launcher's."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager

from ddp_core.base.errors import UserError
from ddp_core.cli.early import EarlyNumerics, require_free
from ddp_core.cli.following import follow_launcher
from ddp_core.config.options import Asked
from ddp_core.distributed.stop import signal_named, stops_at_once
from ddp_core.distributed.world import World, node_here


def train(
    asked: Asked, words: Sequence[str], is_own_process: bool, only_said: bool, blamed: AbstractContextManager[None]
) -> int:
    """Carry out what was asked, or with `only_said` say what that would do; returns the exit code.

    `words` are those of the command, `is_own_process` tells whether this process ends with it, and `blamed` names the
    file that a wrong setting stands in. Raises UserError.
    """
    world = World.from_environment()
    numerics = EarlyNumerics(words, is_own_process)
    numerics.expect(asked)
    asked, is_host = follow_launcher(asked, world, node_here())
    require_free(asked, world)
    # These load torch, which takes seconds.
    from ddp_core.base.determinism import use_chosen_threads
    from ddp_core.cli.prepare import check_request, prepare
    from ddp_core.launch.launch import Meeting, launch
    from ddp_core.run.worker import main, run_worker

    use_chosen_threads()
    with blamed:
        request = prepare(asked, shlex.join(["ddp", *words]), numerics.can_hold)
    numerics.start_anew_unless(request.options.numerics)
    if only_said:
        from ddp_core.cli.dry_run import dry_run

        return dry_run(request)
    early = request.options.stop_signal
    with stops_at_once(*([signal_named(early)] if early else []), silent=not world.is_first):
        if World.is_set():
            if request.layout.kind != "ddp" and world.world_size > 1:
                raise UserError(
                    f"a launcher started {world.world_size} processes, but layout {request.layout.kind} is one "
                    "process; use --layout ddp"
                )
            return run_worker(request, world)
        check_request(request)
        if request.layout.kind != "ddp":
            return run_worker(request, world)
        return launch(request, Meeting(*asked.nnodes, asked.rdzv_endpoint, asked.rdzv_id, is_host), main)
