"""Starts the workers of a request, and sees them to their end; torchrun's agent does it on any number of nodes."""

from __future__ import annotations

import gc
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousTimeoutError,
)

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.refusals import require_open_files
from ddp_core.base.torch_internals import HANDLED_SIGNALS, SEPARATE_STORES
from ddp_core.distributed.reports import read_reports, tell_user, write_launcher
from ddp_core.distributed.stop import asking_signals, describe_signal, stopped_untrained
from ddp_core.experiment.request import Request
from ddp_core.launch.agent import Agent, HandedOver, WouldRepeat
from ddp_core.launch.decision import FINISHING_SECONDS
from ddp_core.launch.meeting import (
    Meeting,
    RendezvousLost,
    facts_of_nodes,
    own_address,
)
from ddp_core.launch.nursery import Entry, Nursery
from ddp_core.launch.supervision import Supervision
from ddp_core.record.directory import RunDirectory, find_launch

_OUTDATED_SECONDS = 60.0
"""So long a file server may show a record as it was before another node changed it."""
_LOOKING_SECONDS = 0.1


class _Ended(UserError):
    """Another node has ended the launch, in whatever way."""

    def __init__(self) -> None:
        super().__init__("another node has ended this launch; its own message says why", ExitCode.PEERS_LOST)


def launch(request: Request, meeting: Meeting, entry: Entry, supervision: Supervision | None = None) -> int:
    """Run the request in workers of this node; returns the exit code.

    A worker is `entry(words)`, where `words` is the path of a file with the request; where it is a fresh interpreter,
    it is `python -m PACKAGE` with the package of that function. `supervision`: by default all workers start again where
    one is lost.
    """
    require_open_files(request.layout.world_size, request.options.workers)
    supervision = supervision or Supervision(request.options.timeout)
    with ExitStack() as stack:
        for number in (*asking_signals(request.options.stop_signal), signal.SIGINT):
            # This process only leaves afterwards, and its exit code says how the launch ended. A handler in Python
            # would not do: the interpreter restores the default handlers before it ends.
            stack.callback(signal.signal, number, signal.SIG_IGN)
        file = Path(stack.enter_context(TemporaryDirectory(prefix="ddp-", ignore_cleanup_errors=True))) / "request.json"
        file.write_text(request.to_json(), encoding="utf-8")
        launch_id = meeting.launch_id or f"ddp-{secrets.token_hex(8)}"
        meeting = replace(meeting, launch_id=launch_id)
        if request.options.launcher == "spawn":
            from ddp_core.launch.spawn import spawn

            code = spawn(request, [str(file)], entry, launch_id)
        else:
            code = _launch_elastic(request, meeting, str(file), entry, supervision)
        if code:
            _close_record(request, meeting, code)
        elif request.evaluated is None:
            _require_completed(request, meeting)
        return code


def _launch_elastic(request: Request, meeting: Meeting, file: str, entry: Entry, supervision: Supervision) -> int:
    """Run the request with torchrun's agent; returns the exit code. Where it raises, the record is closed before."""
    words, facts = ["-m", entry.__module__.rpartition(".")[0], file], facts_of_nodes(request)
    # Only for CPUs: with GPUs, this process may have asked the CUDA driver for them, which does not survive a fork.
    can_fork = request.layout.device == "cpu" and sys.platform == "linux"
    starter: AbstractContextManager[Nursery | None] = Nursery(entry) if can_fork else nullcontext()
    try:
        with starter as nursery:
            return _run_until_met(
                request, meeting, partial(_run_node, request, meeting, words, facts, nursery, supervision)
            )
    except HandedOver:
        raise  # the record is of those that go on
    except UserError as error:
        if (error.exit_code == ExitCode.STOPPED or isinstance(error, _Ended)) and _is_completed(request, meeting):
            return ExitCode.DONE
        _close_record(request, meeting, error.exit_code)
        raise


def _run_until_met(request: Request, meeting: Meeting, run_node: Callable[[], int]) -> int:
    """Run this node again, a few times, when it has lost what its agent cannot do without: the rendezvous.

    The agent itself starts lost workers again. Waits longer each time, about half a minute in all. Raises UserError
    when the rendezvous does not come back.
    """
    pauses = [1.0, 2.0, 4.0, 8.0, 16.0] if meeting.endpoint is not None and request.options.max_restarts else []
    for pause in pauses:
        try:
            return run_node()
        except RendezvousLost as lost:
            if _is_completed(request, meeting):
                return ExitCode.DONE
            tell_user(f"{lost}; trying again in {pause:.0f} s")
        # What is left of the rendezvous has a thread, which must not be the one to clear it away, and perhaps a port.
        gc.collect()
        time.sleep(pause)
    try:
        return run_node()
    except RendezvousLost as lost:
        raise UserError(
            f"{lost}: start `ddp rendezvous --port PORT` there (or the first node again, where that node serves it), "
            "or mend --rdzv-endpoint",
            lost.exit_code,
        ) from None


def _run_node(
    request: Request,
    meeting: Meeting,
    words: Sequence[str],
    facts: Mapping[str, str],
    nursery: Nursery | None,
    supervision: Supervision,
) -> int:
    """Join the other nodes and run `python WORDS` as the workers of this node, restarted as needed.

    The nursery starts them; without one each is a fresh interpreter. Returns the exit code.

    Raises UserError where the rendezvous cannot be reached or is not completed.
    """
    os.environ[SEPARATE_STORES] = "1"
    # The agent's loggers have levels of their own, so their lines are dropped here. This launcher prints what the user
    # must know.
    agents = logging.getLogger("torch.distributed.elastic")
    agents.addHandler(logging.NullHandler())
    agents.propagate = False
    # The agent has handlers of its own. torch's would raise at every signal, also while the workers save: where a
    # scheduler sends two signals at once, the launcher would leave, and kill them.
    os.environ[HANDLED_SIGNALS] = ""
    heard = [*asking_signals(request.options.stop_signal), signal.SIGINT, signal.SIGQUIT]
    address = own_address(meeting)
    # Another node's launcher joins only after its workers have finished, so wait longer than that may take.
    join_seconds = int(max(request.options.timeout, 2 * FINISHING_SECONDS))
    with TemporaryDirectory(prefix="ddp-", ignore_cleanup_errors=True) as scratch:
        reports = Path(scratch) / "reports"
        reports.mkdir()
        write_launcher(reports, *([nursery.pid] if nursery else []))
        os.environ["DDP_REPORT_DIR"] = str(reports)
        before = {number: signal.getsignal(number) for number in heard}
        try:
            nproc_per_node = request.layout.nproc_per_node
            handler = supervision.handler(meeting, address, facts, nproc_per_node, join_seconds)
            spec = WorkerSpec(
                role="trainer",
                local_world_size=nproc_per_node,
                entrypoint=sys.executable,
                args=tuple(words),
                rdzv_handler=handler,
                max_restarts=request.options.max_restarts,
                monitor_interval=supervision.looking,
                local_addr=address,
            )
            logs = DefaultLogsSpecs(log_dir=str(Path(scratch) / "logs"))
            agent = supervision.agent(spec, logs, reports, nursery, heard, facts)
            watched = supervision.watched(agent, handler, meeting)
            return _run_agent(agent, watched, handler, reports, meeting, join_seconds)
        except RendezvousLost:
            # This process goes on. After any other end it leaves.
            for number, handler_before in before.items():
                signal.signal(number, handler_before)
            raise
        finally:
            del os.environ["DDP_REPORT_DIR"]


def _run_agent(
    agent: Agent,
    watched: AbstractContextManager[None],
    handler: RendezvousHandler,
    reports: Path,
    meeting: Meeting,
    join_seconds: int,
) -> int:
    """Run the agent, and make one exit code or one exception of each way in which it can end."""
    try:
        with watched:
            result = agent.run()
    except SignalException as stopped:
        # The rendezvous is not shut down here: that would close it for the nodes that go on.
        return _code_after(stopped.sigval, agent.died_of, reports)
    except WouldRepeat as mistake:
        with suppress(RendezvousError, DistError):
            handler.shutdown()
        mistake.report.tell()
        return mistake.report.exit_code
    except RendezvousTimeoutError:
        raise UserError(
            f"only some of {meeting.min_nodes} nodes met at {meeting.endpoint} within {join_seconds} s; "
            "start the missing ones, or allow fewer with --nnodes MIN:MAX",
            ExitCode.PEERS_LOST,
        ) from None
    except RendezvousClosedError:
        raise _Ended from None
    except (RendezvousError, DistError) as error:
        raise RendezvousLost(meeting.endpoint, error) from None
    code = ExitCode.PEERS_LOST if result is None else _code_of(result, reports)
    # A launch that was asked to stop may go on: a scheduler starts the stopped nodes again, with the same id.
    if code != ExitCode.STOPPED:
        with suppress(RendezvousError, DistError):
            # This node is done: the others need not wait for it.
            handler.shutdown()
    return code


def _code_of(result: RunResult, directory: Path) -> int:
    """The exit code of the launcher; prints the report that explains best how the workers ended."""
    if not result.is_failed():
        return ExitCode.DONE
    reports = read_reports(directory)
    if not reports:
        tell_user("the workers died and no restarts are left; continue with --resume auto")
        return ExitCode.PEERS_LOST
    reports[0].tell()
    if reports[0].trace is not None and len(reports) > 1:
        others = ", ".join(map(str, sorted(report.rank for report in reports[1:])))
        tell_user(f"rank {others} left after it")
    return reports[0].exit_code


def _code_after(number: signal.Signals, died_of: Collection[int], directory: Path) -> int:
    """The exit code after a signal to the launcher, or to a worker that had not begun: 75 where the workers have saved.

    `died_of`: the signals that killed workers. Raises UserError (75) where the workers had not begun: the signal, which
    they handle while they train, has killed them, or they were not there yet.
    """
    reports = read_reports(directory)
    # Where the signal has killed a worker that had not begun, another worker may report that loss; it explains nothing.
    if reports and not (reports[0].exit_code == ExitCode.PEERS_LOST and number in died_of):
        reports[0].tell()
        return reports[0].exit_code
    name = describe_signal(number)
    if number == signal.SIGINT:
        tell_user("interrupted")
    elif signal.SIGKILL in died_of:
        tell_user(f"{name}; the workers were killed before they had saved; continue with --resume auto")
    else:
        raise stopped_untrained(name)
    return 128 + number


def _is_completed(request: Request, meeting: Meeting) -> bool:
    """Whether the run of this launch has come to its end; not where that cannot be read."""
    with suppress(UserError, OSError):
        directory = _run_of(request, meeting)
        return directory is not None and directory.read()["status"] == "completed"
    return False


def _require_completed(request: Request, meeting: Meeting) -> None:
    """Raises UserError where the run of this launch is not completed though every worker has ended with 0.

    Its record is asked, which another node may have on a disk of its own alone: then that node asks it.
    """
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
