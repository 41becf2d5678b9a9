"""One launch on this node with torchrun's agent: join the other nodes, run the workers, end with one exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.torch_internals import HANDLED_SIGNALS, SEPARATE_STORES
from ddp_core.distributed.reports import first_telling, read_reports, write_launcher
from ddp_core.distributed.stop import asking_signals, reason_of, stopped_outside
from ddp_core.launch.agent import Agent, WouldRepeat, say
from ddp_core.launch.decision import FINISHING_SECONDS
from ddp_core.launch.joining import RendezvousLost, ends_keep_alives, join, own_address
from ddp_core.launch.nursery import Nursery
from ddp_core.launch.watchdog import leaves_when_cut_off

_CUT_OFF_SECONDS = 20.0


@dataclass(frozen=True)
class Elastic:
    """How many nodes, how many workers on each, and where they meet (None: this machine alone)."""

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    endpoint: str | None
    launch_id: str
    max_restarts: int
    timeout: float
    stop_signal: str | None = None
    is_host: bool = False
    """Whether the nodes meet at this process."""
    package: str = "ddp_core.run"
    """What a worker that is a fresh interpreter runs (`python -m`)."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What all nodes must have in common: `require_same_request`."""


def run_elastic(settings: Elastic, arguments: Sequence[str], nursery: Nursery | None) -> int:
    """Run `python -m PACKAGE ARGUMENTS` as the workers of this node, restarted as needed; returns the exit code.

    The nursery starts them; without one each is a fresh interpreter.

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
    heard = [*asking_signals(settings.stop_signal), signal.SIGINT, signal.SIGQUIT]
    address = own_address(settings.endpoint, settings.is_host)
    with TemporaryDirectory(prefix="ddp-") as scratch:
        reports = Path(scratch) / "reports"
        reports.mkdir()
        write_launcher(reports, *([nursery.pid] if nursery else []))
        os.environ["DDP_REPORT_DIR"] = str(reports)
        before = {number: signal.getsignal(number) for number in heard}
        try:
            return _run(settings, arguments, address, reports, nursery, heard)
        except RendezvousLost:
            # This process goes on. After any other end it leaves.
            for number, handler in before.items():
                signal.signal(number, handler)
            raise
        finally:
            del os.environ["DDP_REPORT_DIR"]


def _run(
    settings: Elastic,
    arguments: Sequence[str],
    address: str,
    reports: Path,
    nursery: Nursery | None,
    heard: Sequence[signal.Signals],
) -> int:
    # Another node's launcher joins only after its workers have finished, so wait longer than that may take.
    join_seconds = int(max(settings.timeout, 2 * FINISHING_SECONDS))
    nnodes = (settings.min_nodes, settings.max_nodes)
    handler = join(settings.endpoint, settings.launch_id, nnodes, address, join_seconds, settings.is_host)
    spec = WorkerSpec(
        role="trainer",
        local_world_size=settings.nproc_per_node,
        entrypoint=sys.executable,
        args=("-m", settings.package, *arguments),
        rdzv_handler=handler,
        max_restarts=settings.max_restarts,
        local_addr=address,
    )
    agent = Agent(spec, DefaultLogsSpecs(log_dir=str(reports.parent / "logs")), reports, nursery, heard, settings.facts)
    try:
        patience = max(2 * settings.timeout, _CUT_OFF_SECONDS)
        with ends_keep_alives(handler), leaves_when_cut_off(settings.endpoint, patience, agent.kill_workers):
            result = agent.run()
    except SignalException as stopped:
        # The rendezvous is not shut down here: that would close it for the nodes that go on.
        return _code_after(stopped.sigval, agent.died_of, reports)
    except WouldRepeat as mistake:
        with contextlib.suppress(RendezvousError, DistError):
            handler.shutdown()
        mistake.report.tell()
        return mistake.report.exit_code
    except RendezvousTimeoutError:
        raise UserError(
            f"only some of {settings.min_nodes} nodes met at {settings.endpoint} within {join_seconds} s; "
            "start the missing ones, or allow fewer with --nnodes MIN:MAX",
            ExitCode.PEERS_LOST,
        ) from None
    except RendezvousClosedError:
        raise UserError("another node has ended this launch; its own message says why", ExitCode.PEERS_LOST) from None
    except (RendezvousError, DistError) as error:
        raise RendezvousLost(settings.endpoint, error) from None
    code = ExitCode.PEERS_LOST if result is None else _code_of(result, reports)
    # A launch that was asked to stop may go on: a scheduler starts the stopped nodes again, with the same id.
    if code != ExitCode.STOPPED:
        with contextlib.suppress(RendezvousError, DistError):
            # This node is done: the others need not wait for it.
            handler.shutdown()
    return code


def _code_of(result: RunResult, directory: Path) -> int:
    """The exit code of the launcher; prints the report that explains best how the workers ended."""
    if not result.is_failed():
        return ExitCode.DONE
    reports = read_reports(directory)
    report = first_telling(reports)
    if report is None:
        say("the workers died and no restarts are left; continue with --resume auto")
        return ExitCode.PEERS_LOST
    report.tell()
    if report.trace and len(reports) > 1:
        others = ", ".join(str(other.rank) for other in sorted(reports[1:], key=lambda other: other.rank))
        say(f"rank {others} left after it")
    return report.exit_code


def _code_after(number: signal.Signals, died_of: Collection[int], directory: Path) -> int:
    """The code after a signal to the launcher, or to a worker that had not begun: 75 where the workers have saved.

    `died_of`: the signals that killed workers. Raises UserError (75) where these had not begun: the signal itself,
    which they handle while they train, has killed them, or they were not there yet.
    """
    report = first_telling(read_reports(directory))
    # One worker may have lost another that had not begun, and that the signal has killed.
    if report is not None and not (report.exit_code == ExitCode.PEERS_LOST and number in died_of):
        report.tell()
        return report.exit_code
    if number == signal.SIGINT:
        say("interrupted")
    else:
        if signal.SIGKILL not in died_of:
            raise stopped_outside(reason_of(number))
        say(f"{reason_of(number)}; the workers were killed before they had saved; continue with --resume auto")
    return 128 + number
