"""Starts the workers of a request, and sees them to their end; torchrun's agent does it on any number of nodes."""

from __future__ import annotations

import gc
import secrets
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.refusals import require_open_files
from ddp_core.distributed.reports import tell_user
from ddp_core.distributed.stop import asking_signals
from ddp_core.experiment.request import Request
from ddp_core.launch.nodes import EndedElsewhere, HandedOver, Meeting, RendezvousLost
from ddp_core.launch.nursery import Entry, Nursery
from ddp_core.launch.supervision import Supervision
from ddp_core.record.directory import RunDirectory, find_launch
from ddp_core.record.environment import tell_children_of_code

_OUTDATED_SECONDS = 60.0
"""So long a file server may show a record as it was before another node changed it."""
_LOOKING_SECONDS = 0.1


def launch(request: Request, meeting: Meeting, entry: Entry, supervision: Supervision) -> int:
    """Run the request in workers of this node; returns the exit code.

    A worker is `entry(words)`, where `words` is the path of a file with the request; where it is a fresh interpreter,
    it is `python -m PACKAGE` with the package of that function.
    """
    require_open_files(request.layout.world_size, request.options.workers)
    with ExitStack() as stack:
        for number in (*asking_signals(request.options.stop_signal), signal.SIGINT):
            # This process only leaves afterwards, and its exit code says how the launch ended. A handler in Python
            # would not do: the interpreter restores the default handlers before it ends.
            stack.callback(signal.signal, number, signal.SIG_IGN)
        file = Path(stack.enter_context(TemporaryDirectory(prefix="ddp-", ignore_cleanup_errors=True))) / "request.json"
        file.write_text(request.to_json(), encoding="utf-8")
        launch_id = meeting.launch_id or f"ddp-{secrets.token_hex(8)}"
        meeting = replace(meeting, launch_id=launch_id)
        if code := _launch_elastic(request, meeting, str(file), entry, supervision):
            _close_record(request, meeting, code)
        elif request.evaluated is None:
            _require_completed(request, meeting)
        return code


def _launch_elastic(request: Request, meeting: Meeting, file: str, entry: Entry, supervision: Supervision) -> int:
    """Run the request with torchrun's agent; returns the exit code. Where it raises, the record is closed before."""
    words = ["-m", entry.__module__.rpartition(".")[0], file]
    # Only for CPUs: with GPUs, this process may have asked the CUDA driver for them, which does not survive a fork.
    can_fork = request.layout.device == "cpu" and sys.platform == "linux"
    starter: AbstractContextManager[Nursery | None] = Nursery(entry) if can_fork else nullcontext()
    tell_children_of_code()  # a worker that replaces a lost one must have the code version of the others
    try:
        with starter as nursery:
            # Loaded after the nursery was forked, because workers have no use for it.
            from ddp_core.launch.elastic import run_node
            from ddp_core.launch.meeting import facts_of_nodes

            node = partial(run_node, request, meeting, words, facts_of_nodes(request), nursery, supervision)
            return _run_until_met(request, meeting, node)
    except HandedOver:
        raise  # the record is of those that go on
    except UserError as error:
        is_ended = error.exit_code == ExitCode.STOPPED or isinstance(error, EndedElsewhere)
        if is_ended and _is_completed(request, meeting):
            return ExitCode.DONE
        _close_record(request, meeting, error.exit_code)
        raise


def _run_until_met(request: Request, meeting: Meeting, run_node: Callable[[], int]) -> int:
    """Run this node again when it has lost the rendezvous, without which no agent goes on; five times at most."""
    pauses = iter((1, 2, 4, 8, 16) if meeting.endpoint is not None and request.options.max_restarts else ())
    while True:
        try:
            return run_node()
        except RendezvousLost as lost:
            if (pause := next(pauses, None)) is None:
                raise UserError(
                    f"{lost}: start `ddp rendezvous --port PORT` there (or the first node again, where that node "
                    "serves it), or mend --rdzv-endpoint",
                    lost.exit_code,
                ) from None
            if _is_completed(request, meeting):
                return ExitCode.DONE
            tell_user(f"{lost}; trying again in {pause} s")
        # What is left of the rendezvous has a thread, which must not be the one to clear it away, and perhaps a port.
        gc.collect()
        time.sleep(pause)


def _is_completed(request: Request, meeting: Meeting) -> bool:
    """Whether the run of this launch has come to its end; not where that cannot be read."""
    with suppress(UserError, OSError):
        directory = _run_of(request, meeting)
        return directory is not None and directory.read()["status"] == "completed"
    return False


def _require_completed(request: Request, meeting: Meeting) -> None:
    """Raises UserError where the run of this launch is not completed though every worker has ended with 0."""
    # Its record is asked, which another node may have on a disk of its own alone: then that node asks it.
    until = time.monotonic() + (_OUTDATED_SECONDS if meeting.max_nodes > 1 else 0)
    while not _is_completed(request, meeting):
        directory = _run_of(request, meeting)
        if directory is None and meeting.max_nodes > 1:
            return
        if time.monotonic() > until:
            _close_record(request, meeting, ExitCode.BAD_INPUT)
            which = "no run of this launch is there" if directory is None else f"{directory.path} is not completed"
            raise UserError(
                f"every worker of this node ended with exit code 0, but {which}: code that the experiment calls ended "
                "a process in mid-training; let it raise an exception instead"
            )
        time.sleep(_LOOKING_SECONDS)


def _close_record(request: Request, meeting: Meeting, code: int) -> None:
    """Record how the run of this launch ended, where rank 0 may have died before it could."""
    # Where the disk is full or gone, the user has been told what ended the launch, and the exit code says it.
    with suppress(UserError, OSError):
        directory = _run_of(request, meeting)
        if directory is not None and directory.read()["status"] == "running" and not directory.is_worked_in:
            lost = code == ExitCode.PEERS_LOST
            message = "the workers were lost" if lost else f"the launch ended with exit code {int(code)}"
            status = "stopped" if code == ExitCode.STOPPED else "failed"
            directory.update(status=status, exit_code=int(code), message=message)


def _run_of(request: Request, meeting: Meeting) -> RunDirectory | None:
    assert meeting.launch_id is not None
    if request.resume not in ("auto", "never"):
        directory = RunDirectory(Path(request.resume))
        # A launch that was refused has not begun to work on the run that it was to continue.
        return directory if directory.read()["launch_id"] == meeting.launch_id else None
    return find_launch(Path(request.options.output), request.loaded.experiment, meeting.launch_id)


def with_recovery(request: Request, most_nodes: int) -> Request:
    """The request with the recovery that it can have on so many nodes at most. Raises UserError (2) for a wrong one."""
    # `auto` becomes a restart wherever the workers cannot go on without a lost one, where nobody would be left, and
    # where going on is not known to be wanted: with callbacks, which may be told of a step once more, and on GPUs,
    # where it has not run over NCCL. A live one becomes a restart, and the user is told, with shards.
    layout, options = request.layout, request.options
    if options.recovery == "restart":
        return request
    obstacles = {
        "only with the exact reduction do fewer processes compute the same bits": options.reduction != "exact",
        "--shares is for ranks that stay the same": bool(layout.dealt),
    }
    found = next((words for words, is_so in obstacles.items() if is_so), None)
    if options.recovery == "auto":
        is_live = (
            found is None
            and layout.shard == "none"
            and layout.device == "cpu"
            and most_nodes * layout.nproc_per_node > 1
            and options.max_restarts > 0
            and request.evaluated is None
            and not request.loaded.namespace.get("callbacks")
        )
    elif found is not None:
        raise UserError(f"--recovery live cannot be had here: {found}; use --recovery restart")
    elif not (is_live := layout.shard == "none"):
        tell_user(
            f"--recovery live: with --shard {layout.shard} each part is on one rank alone, and is lost with it; where "
            "a rank is lost, all start again from the newest checkpoint, as with --recovery restart"
        )
    return replace(request, options=options.model_copy(update={"recovery": "live" if is_live else "restart"}))
