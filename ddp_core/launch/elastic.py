"""Runs torchrun's agent on this node once, and makes one exit code or one exception of each way in which that ends."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
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
from ddp_core.base.torch_internals import HANDLED_SIGNALS, SEPARATE_STORES
from ddp_core.distributed.reports import read_reports, tell_user, write_launcher
from ddp_core.distributed.stop import asking_signals, describe_signal, stopped_untrained
from ddp_core.experiment.request import Request
from ddp_core.launch.agent import FINISHING_SECONDS, Agent, WouldRepeat
from ddp_core.launch.meeting import own_address
from ddp_core.launch.nodes import EndedElsewhere, Meeting, RendezvousLost
from ddp_core.launch.nursery import Nursery
from ddp_core.launch.supervision import Supervision


def run_node(
    request: Request,
    meeting: Meeting,
    words: Sequence[str],
    facts: Mapping[str, str],
    nursery: Nursery | None,
    supervision: Supervision,
) -> int:
    """Join the other nodes and run `python WORDS` as this node's workers, restarted as needed; returns the code."""
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
        raise EndedElsewhere from None
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

    Raises UserError (75) where the workers had not begun: the signal, which they handle while they train, has killed
    them, or they were not there yet.
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
