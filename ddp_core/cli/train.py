"""`ddp train`: from what was asked to one request, and on to this process's own work or to a launcher's.

What a launcher outside decides (SLURM, MPI, Kubeflow, torchrun) is filled in first: so the same command on every node
or rank is one training, and not as many trainings as there are processes.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_core.base.beneath import read_file
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import is_address
from ddp_core.base.user_code import no_silent_end
from ddp_core.config.options import Asked, NodeRange
from ddp_core.config.records import Numerics
from ddp_core.distributed.addresses import address_served, require_port
from ddp_core.distributed.launchers import Node
from ddp_core.distributed.reports import report_end
from ddp_core.distributed.stop import signal_named, stops_at_once
from ddp_core.distributed.world import World, node_here
from ddp_core.experiment.file import find_experiment
from ddp_core.numerics.limits import LIMITS, limits_hold, portable_refused_by
from ddp_core.record.lock import require_unlocked

if TYPE_CHECKING:
    from ddp_core.experiment.request import Evaluated, Request

_ALONE = "for a training of its own in each process, say --nnodes 1"
_SECOND_START = "DDP_SECOND_START"
_GPU_DRIVER = Path("/dev/nvidiactl")
_PORTABLE = re.compile(rb"""^[^#\n]*\bnumerics["']?\s*[=:]\s*["']portable""", re.MULTILINE)
"""How an experiment's file, or a run.json, says so."""


def carry_out(
    asked: Asked,
    words: Sequence[str],
    is_own_process: bool,
    evaluated: Callable[[], Evaluated] | None = None,
    is_rehearsal: bool = False,
) -> int:
    """Train as asked, or only rehearse it; returns the exit code.

    `words`: the command line without `ddp`. `is_own_process`: whether this process ends with the command.
    `evaluated`: called once torch may be loaded; the weights that it names are evaluated, and nothing is trained.
    """
    if asked.record is None:
        find_experiment(asked.experiment)  # a typo is answered before torch is loaded, which takes seconds
    world = World.from_environment()
    numerics = EarlyNumerics(asked, words, is_own_process)
    asked, is_host = follow_launcher(asked, world, node_here())
    if not is_rehearsal and any(
        map(is_address, filter(None, (asked.output, asked.resume, asked.fork, asked.init_from)))
    ):
        asked = in_store(asked)
    require_free(asked, world)
    # These load torch, which takes seconds.
    from ddp_core.base.determinism import use_one_thread
    from ddp_core.cli.prepare import prepare

    use_one_thread()
    with no_silent_end(partial(report_end, world, ExitCode.BAD_INPUT)):
        request = prepare(asked, shlex.join(["ddp", *words]), numerics.can_hold)
    if evaluated is not None:
        request = replace(request, evaluated=evaluated())
    numerics.start_anew_unless(request.options.numerics)
    if is_rehearsal:
        from ddp_core.cli.layouts import rehearse

        return rehearse(request)
    train = partial(_train, request, world, is_host)
    if not is_address(asked.output):
        return train()
    from ddp_core.remote import copied

    return copied(asked.output, train)


def _train(request: Request, world: World, is_host: bool) -> int:
    """Train in this process, or launch the processes that do; returns the exit code."""
    from ddp_core.cli.prepare import check_request
    from ddp_core.run.repeater import vouched_for
    from ddp_core.run.run import run_worker, worker_main

    asked, name = request.asked, request.options.stop_signal
    early_signals = [signal_named(name)] if name else []
    with stops_at_once(*early_signals, prints=world.is_first):
        if World.is_set():
            if request.layout.kind != "ddp" and world.world_size > 1:
                raise UserError(
                    f"a launcher started {world.world_size} processes, but layout {request.layout.kind} is one "
                    "process; use --layout ddp"
                )
            if request.options.recovery == "live":
                raise UserError("--recovery live needs ddp's own launcher, and another one started this process")
            # Other ranks wait for this one, so there is no time for a rehearsal.
            with vouched_for(request, rehearses=False) if world.is_first else nullcontext():
                return run_worker(request, world)
        with no_silent_end(partial(report_end, world, ExitCode.BAD_INPUT)):
            check_request(request)
        with vouched_for(request, rehearses=True) as request:
            if request.layout.kind != "ddp":
                return run_worker(request, world)
            from ddp_core.launch.launch import launch, with_recovery
            from ddp_core.launch.nodes import Meeting
            from ddp_core.launch.supervision import Supervision

            meeting = Meeting(*asked.nnodes, asked.rdzv_endpoint, asked.rdzv_id, is_host)
            request = with_recovery(request, meeting.max_nodes)
            if request.options.recovery == "live":
                from ddp_core.live.launch import launch_live

                return launch_live(request, meeting)
            return launch(request, meeting, worker_main, Supervision(request.options.timeout))


def require_free(asked: Asked, world: World) -> None:
    """Refuse early, before torch is loaded, where another process has the run directory or the port."""
    # Either may still be taken a moment later: the run itself asks again, and then keeps both.
    if world.serves_store and asked.layout == "ddp":
        assert world.store_port is not None
        address = address_served(str(world.store_host))
        require_port(address, world.store_port, world.port_name, "give the ranks another one")
    elif not World.is_set() and asked.resume not in ("auto", "never") and asked.nnodes.high == 1:
        # A worker of a launcher outside, or one of several nodes, may find the directory in use by its own launch.
        require_unlocked(Path(asked.resume))


def follow_launcher(asked: Asked, world: World, node: Node | None) -> tuple[Asked, bool]:
    """What was asked, with layout, nodes, ranks and meeting place from the launcher; and whether the nodes meet here.

    `node`: the place of this process, if it was started once on each node. What the user has given is kept.
    """
    given = asked.model_fields_set
    if world.world_size > 1:
        return (asked if "layout" in given else asked.model_copy(update={"layout": "ddp"})), False
    if node is None or ("nnodes" in given and asked.nnodes.high == 1):
        return asked, False
    _require_whole(asked, node)
    found: dict[str, Any] = {"layout": "ddp"}
    if node.nnodes is not None and "nnodes" not in given:
        found["nnodes"] = NodeRange(node.nnodes, node.nnodes)
    if asked.rdzv_endpoint is None:
        found["rdzv_endpoint"] = node.endpoint
    if asked.rdzv_id is None:
        found["rdzv_id"] = node.launch_id
    if asked.nproc_per_node is None:
        # One rank for each GPU given to the node, else one for each core asked for.
        gpus = node.gpus if asked.device != "cpu" else None
        if count := node.nproc_per_node or gpus or node.cpus:
            found["nproc_per_node"] = count
    return asked.model_copy(update=found), asked.rdzv_endpoint is None and node.is_first


def _require_whole(asked: Asked, node: Node) -> None:
    """Raises UserError where the options contradict the launcher, or both together do not tell enough."""
    given = asked.model_fields_set
    if "layout" in given and asked.layout != "ddp":
        raise UserError(
            f"this is {node.description}, but layout {asked.layout} is one process: each node would train the same by "
            f"itself; use --layout ddp, or {_ALONE}"
        )
    low, high = asked.nnodes
    if "nnodes" in given and node.nnodes is not None and not low <= node.nnodes <= high:
        raise UserError(f"--nnodes {asked.nnodes}, but this is {node.description}")
    wanted = {
        "--nnodes N": node.nnodes is not None or "nnodes" in given,
        "--rdzv-endpoint HOST:PORT": node.endpoint is not None or asked.rdzv_endpoint is not None,
        "--rdzv-id ID": node.launch_id is not None or asked.rdzv_id is not None,
    }
    missing = [option for option, known in wanted.items() if not known]
    if missing:
        raise UserError(
            f"this is {node.description}, which does not tell all that a launch of several nodes needs: add "
            f"{', '.join(missing)}, the same on every node, with an id that was never used before; or {_ALONE}"
        )


def in_store(asked: Asked) -> Asked:
    """What was asked, with what it goes on with brought from the store that `--output` or `--resume` names."""
    from ddp_core.remote import brought_to_train, local

    for option, given in (("--fork", asked.fork), ("--init-from", asked.init_from)):
        if given is not None and is_address(given):
            raise UserError(f"{option} {given}: give a local folder; of a run in a store --output and --resume go on")
    changes, wanted = {}, find_experiment(asked.experiment).name if asked.resume == "auto" else ""
    if is_address(asked.resume):
        place = local(asked.resume)
        folder = asked.resume.rstrip("/").rsplit("/", 2)[0]
        if not is_address(folder) or ("output" in asked.model_fields_set and asked.output.rstrip("/") != folder):
            raise UserError(
                f"--resume {asked.resume}: give --output/EXPERIMENT/RUN, such as s3://bucket/runs/digits/RUN"
            )
        changes, wanted = {"output": folder, "resume": str(place)}, f"{place.parent.name}/{place.name}"
    asked = asked.model_copy(update=changes)
    if is_address(asked.output):
        if World.is_set() or asked.nnodes.high > 1:
            raise UserError(
                f"--output {asked.output}: a run in a store is of one node, and started by ddp itself; give several "
                "nodes a folder that they share"
            )
        brought_to_train(asked.output, wanted)
    return asked


class EarlyNumerics:
    """The numerics of this process: set as expected before torch is loaded, and put right once the request is known."""

    # The experiment says which numerics it is for, but its file can only be run with torch. So the file's text is first
    # searched for that. Where what is found proves wrong, because the file computes the value perhaps, the process
    # starts itself anew. Where it does not end with the command, its variables stay as they are, and it is not.

    def __init__(self, asked: Asked, words: Sequence[str], is_own_process: bool) -> None:
        # Workers must not inherit the variable: they may have to be started anew themselves.
        self._is_second = os.environ.pop(_SECOND_START, None) is not None
        self._words, self._is_own = words, is_own_process
        self._before = dict(os.environ)
        may_set = is_own_process and not self._is_second and "torch" not in sys.modules
        self._has_set_limits = may_set and expected_numerics(asked) != "native"
        if self._has_set_limits:
            os.environ.update(LIMITS)

    def can_hold(self, numerics: Numerics) -> bool:
        """Whether this process computes with these numerics, or may be started anew so that it does."""
        return self._holds(numerics) or (self._is_own and not self._is_second)

    def _holds(self, numerics: Numerics) -> bool:
        return limits_hold() if numerics != "native" else not self._has_set_limits

    def start_anew_unless(self, numerics: Numerics) -> None:
        """Start this process anew, and do not return, where it does not compute with these numerics but can."""
        if not self._holds(numerics) and self.can_hold(numerics):
            limits = LIMITS if numerics != "native" else {}
            sys.stdout.flush()
            sys.stderr.flush()
            words = [sys.executable, "-m", "ddp_core", *self._words]
            os.execve(sys.executable, words, {**self._before, **limits, _SECOND_START: "1"})


def expected_numerics(asked: Asked) -> Numerics:
    """The numerics that the request will have, as far as can be told without loading torch."""
    has_gpu = asked.device == "cuda" or (asked.device == "auto" and _GPU_DRIVER.exists())
    if has_gpu or portable_refused_by() is not None:
        return "native"
    if asked.numerics is not None:
        return asked.numerics
    pairs = [setting.partition("=") for setting in asked.settings]
    settings = [value.strip() for name, _, value in pairs if name.strip() == "numerics"]
    is_portable = settings[-1].strip('"') == "portable" if settings else _is_written_portable(asked)
    return "portable" if is_portable else "native"


def _is_written_portable(asked: Asked) -> bool:
    """Whether the run.json to train again, or else the experiment's file, has `numerics="portable"` in it."""
    try:
        file = find_experiment(asked.experiment) if asked.record is None else Path(asked.record)
        return _PORTABLE.search(read_file(file)) is not None
    except (OSError, UserError):
        return False  # the run itself says what is wrong with the file
