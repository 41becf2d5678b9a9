"""torchrun's agent under our rules: which failures are worth a restart, and what the user is told.

Settings follow from what was measured: a store of its own per round (restarts race otherwise), short keep-alives, a
join
timeout above the shutdown timeout, addresses instead of host names, and a random rendezvous id per launch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing import api as torch_processes
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousTimeoutError,
    registry,
)

from ddp_core.distributed.processes import Process, await_processes, end_processes, is_stopped
from ddp_core.distributed.stop import signal_named
from ddp_core.errors import ExitCode, UserError
from ddp_core.launch.nursery import Nursery, Nursling
from ddp_core.launch.watchdog import leaves_when_cut_off
from ddp_core.launch.worker import Report, clear_reports, first_telling, read_reports, write_launcher

_ANSWER_SECONDS = 10
# After a request: a step is finished and saved. After a loss there is nothing left to finish.
_SHUTDOWN_SECONDS = 25
_CUT_OFF_SECONDS = 20.0
_LEAVING_SECONDS = 8
_SAYING_SECONDS = 1.0
# torch's rendezvous answers from what it heard within the last second (_BackendRendezvousStateHolder, cache_duration).
_STALE_SECONDS = 1.2
_MAKING_ROOM = "another node has come; the workers save and start again with it"
_HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_FINAL = set(ExitCode) - {ExitCode.DONE, ExitCode.PEERS_LOST}


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


def run_elastic(settings: Elastic, arguments: Sequence[str], nursery: Nursery | None) -> int:
    """Run `python -m ddp_core ARGUMENTS` as the workers of this node, restarted as needed; returns the exit code.

    The nursery starts them; without one each is a fresh interpreter.

    Raises UserError where the rendezvous cannot be reached or is not completed.
    """
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # Its loggers have levels of their own; what they say ends here. The launcher says what the user must know.
    agents = logging.getLogger("torch.distributed.elastic")
    agents.addHandler(logging.NullHandler())
    agents.propagate = False
    early = [signal_named(settings.stop_signal)] if settings.stop_signal else []
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in (*_HEARD, *early))
    local_address = _own_address(settings.endpoint)
    if settings.endpoint is None:
        # One machine talks to itself; its host name need not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with TemporaryDirectory(prefix="ddp-") as scratch:
        reports = Path(scratch) / "reports"
        reports.mkdir()
        write_launcher(reports, *([nursery.pid] if nursery else []))
        os.environ["DDP_REPORT_DIR"] = str(reports)
        try:
            return _run(settings, arguments, local_address, Path(scratch), reports, nursery)
        finally:
            del os.environ["DDP_REPORT_DIR"]


def _run(
    settings: Elastic,
    arguments: Sequence[str],
    address: str,
    scratch: Path,
    reports: Path,
    nursery: Nursery | None,
) -> int:
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=settings.endpoint or "127.0.0.1:0",
        run_id=settings.launch_id,
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        local_addr=address,
        is_host="false" if settings.endpoint else "true",
        join_timeout=int(max(settings.timeout, 2 * _SHUTDOWN_SECONDS)),
        last_call_timeout=2,
        keep_alive_interval=1,
        keep_alive_max_attempt=3,
        read_timeout=30,
    )
    if settings.endpoint is not None:
        _await_answer(settings.endpoint)
    try:
        handler = registry.get_rendezvous_handler(parameters)
    except RendezvousError as error:
        raise RendezvousLost(settings.endpoint, error) from None
    spec = WorkerSpec(
        role="trainer",
        local_world_size=settings.nproc_per_node,
        entrypoint=sys.executable,
        args=("-m", "ddp_core", *arguments),
        rdzv_handler=handler,
        max_restarts=settings.max_restarts,
        local_addr=address,
    )
    logs = DefaultLogsSpecs(log_dir=str(scratch / "logs"))
    agent = _Agent(spec, logs, reports, nursery)
    patience = max(2 * settings.timeout, _CUT_OFF_SECONDS)
    try:
        with leaves_when_cut_off(settings.endpoint, patience, agent.kill_workers):
            result = agent.run()
    except SignalException as stopped:
        # Not shut down: that would close the rendezvous for the nodes that go on.
        return agent.ended_by(stopped.sigval)
    except _WouldRepeat as mistake:
        with contextlib.suppress(RendezvousError, DistError):
            handler.shutdown()
        mistake.report.tell()
        return mistake.report.exit_code
    except RendezvousTimeoutError:
        raise UserError(
            f"only some of {settings.min_nodes} nodes met at {settings.endpoint} within "
            f"{parameters.config['join_timeout']} s; start the missing ones, or allow fewer with --nnodes MIN:MAX",
            ExitCode.PEERS_LOST,
        ) from None
    except RendezvousClosedError:
        raise UserError("another node has ended this launch; its own message says why", ExitCode.PEERS_LOST) from None
    except (RendezvousError, DistError) as error:
        raise RendezvousLost(settings.endpoint, error) from None
    with contextlib.suppress(RendezvousError, DistError):
        # Nobody needs to wait for this node any more.
        handler.shutdown()
    return ExitCode.PEERS_LOST if result is None else agent.exit_code(result)


class RendezvousLost(UserError):
    """The store that the nodes meet at is gone; another launch may find it again."""

    def __init__(self, endpoint: str | None, error: BaseException) -> None:
        reason = str(error).strip().partition("\n")[0]
        super().__init__(f"the rendezvous at {endpoint} is lost ({reason})", ExitCode.PEERS_LOST)


class _WouldRepeat(Exception):
    """A worker has ended over something that a new start would only repeat."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.message)
        self.report = report


class _Agent(LocalElasticAgent):
    """Restarts after losses, not after mistakes: what would fail again in the same way ends the launch."""

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, reports: Path, nursery: Nursery | None) -> None:
        super().__init__(spec, logs, shutdown_timeout=_SHUTDOWN_SECONDS)
        self._reports, self._nursery = reports, nursery

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        try:
            result: RunResult = super()._invoke_run(role)
        except (RendezvousConnectionError, DistError):
            # Said at once: the workers have a step to finish and to save before this launcher can do anything else.
            self._say("the rendezvous does not answer; the workers save and leave, to meet again when it is back")
            raise
        return result

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        explained = self._notice(worker_group)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            reports = read_reports(self._reports)
            # A worker that has said why it leaves may be killed before it is gone.
            codes = {failure.exitcode for failure in result.failures.values()}
            codes |= {report.exit_code for report in reports}
            if ExitCode.STOPPED in codes and self._is_awaited(worker_group):
                # Another node's agent was quicker: its workers and ours have saved, to start again with the newcomer.
                self._say(_MAKING_ROOM)
                self._remaining_restarts += 1
            elif codes & _FINAL:
                self._remaining_restarts = 0
            elif self._remaining_restarts > 0:
                if reports and not explained:
                    self._say(reports[0].message.removesuffix("; continue with --resume auto"))
                left = self._remaining_restarts - 1
                self._say(f"starting the workers again from the last checkpoint ({left} more restarts allowed)")
        return result

    def _notice(self, worker_group: WorkerGroup) -> bool:
        """If a worker has failed, end the others; whether it has been said which one was killed or is stopped."""
        workers = [(worker.global_rank, self._processes()[worker.local_rank]) for worker in worker_group.workers]
        codes = {rank: code for rank, process in workers if (code := process.poll())}
        if not codes:
            return False
        lost = {rank: f"was killed ({signal.Signals(-code).name})" for rank, code in codes.items() if code < 0}
        lost |= {rank: "is stopped; it is killed now" for rank, process in workers if is_stopped(process.pid)}
        for rank, what in sorted(lost.items()):
            self._say(f"rank {rank} (node {worker_group.group_rank}) {what}")
        asked = any(code in _FINAL for code in codes.values())
        # All notice the loss by themselves, and the one that caused it has something to say.
        await_processes(self._processes().values(), _SAYING_SECONDS)
        end_processes(self._processes().values(), signal.SIGTERM, _SHUTDOWN_SECONDS if asked else _LEAVING_SECONDS)
        return bool(lost)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:
            self._say(_MAKING_ROOM)
            self._stop_workers(worker_group)
            # It may be a peer that has lost a worker of ours, and was quicker than that one's end.
            report = first_telling(read_reports(self._reports))
            if report is not None and report.exit_code in _FINAL - {ExitCode.STOPPED}:
                raise _WouldRepeat(report)
        super()._restart_workers(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # What the workers of the round before have said, if only that they saved and left, is no failure of this one.
        clear_reports(self._reports)
        with _started_by(self._nursery):
            started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _is_awaited(self, worker_group: WorkerGroup) -> bool:
        """Whether a node waits to be taken in. Raises RendezvousConnectionError where the rendezvous is gone."""
        if worker_group.workers[0].world_size == worker_group.spec.local_world_size:
            return False  # no other agent could have been quicker
        deadline = time.monotonic() + _STALE_SECONDS
        while not (waiting := worker_group.spec.rdzv_handler.num_nodes_waiting()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return bool(waiting)

    def _processes(self) -> dict[int, Process]:
        """This node's workers by local rank, none before the first start."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {local_rank: handler.proc for local_rank, handler in handlers.items()}

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = _SHUTDOWN_SECONDS) -> None:
        """End the workers; at once when a second SIGINT comes while they finish."""
        # A worker knows no other signals than these and its early one; a lost terminal (SIGHUP) is a request, too.
        asking = signal.SIGTERM if death_sig in (signal.SIGHUP, signal.SIGQUIT) else death_sig
        try:
            end_processes(self._processes().values(), asking, timeout)
        except SignalException as again:
            impatient = again.sigval == signal.SIGINT
            self._shutdown(signal.SIGKILL if impatient else asking, 0 if impatient else timeout)
        super()._shutdown(death_sig, timeout)

    def kill_workers(self) -> None:
        """SIGKILL to all of this node's workers, from any thread."""
        for process in self._processes().values():
            process.kill()

    def exit_code(self, result: RunResult) -> int:
        """The code for the launcher, after saying what the most telling worker had to say."""
        if not result.is_failed():
            return ExitCode.DONE
        reports = read_reports(self._reports)
        report = first_telling(reports)
        if report is None:
            self._say("the workers died and no restarts are left; continue with --resume auto")
            return ExitCode.PEERS_LOST
        report.tell()
        if report.trace and len(reports) > 1:
            others = ", ".join(str(other.rank) for other in sorted(reports[1:], key=lambda other: other.rank))
            self._say(f"rank {others} left after it")
        return report.exit_code

    def ended_by(self, number: signal.Signals) -> int:
        """The code after a signal to the launcher: 75 where the workers saved and left."""
        report = first_telling(read_reports(self._reports))
        if report is None:
            return 128 + number
        report.tell()
        return report.exit_code

    @staticmethod
    def _say(text: str) -> None:
        print(f"ddp: {text}", file=sys.stderr, flush=True)


class _NurseryHandler:
    """A nursling in the place of torch's SubprocessHandler."""

    def __init__(self, nursling: Nursling) -> None:
        self.proc = nursling

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Signal the whole process group, as torch's does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)


@contextlib.contextmanager
def _started_by(nursery: Nursery | None) -> Iterator[None]:
    """While in the block, torch's agent has its workers from the nursery. It offers no other place to say so."""
    if nursery is None:
        yield
        return
    fresh = torch_processes.get_subprocess_handler

    def start(
        entrypoint: str, args: tuple[str, ...], env: dict[str, str], *others: Any, **named: Any
    ) -> _NurseryHandler | SubprocessHandler:
        _, _, *words = args  # -m ddp_core
        try:
            return _NurseryHandler(nursery.start(words, {**os.environ, **env}))
        except OSError:
            # It was killed, for want of memory perhaps; the workers start as they would without it.
            return fresh(entrypoint, args, env, *others, **named)

    torch_processes.get_subprocess_handler = start  # type: ignore[assignment]
    try:
        yield
    finally:
        torch_processes.get_subprocess_handler = fresh


def _await_answer(endpoint: str) -> None:
    """Wait for somebody to listen there; torch would wait for a minute, and show its call stack."""
    host, _, port = endpoint.rpartition(":")
    deadline = time.monotonic() + _ANSWER_SECONDS
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RendezvousLost(endpoint, error) from None
        time.sleep(0.2)


def _own_address(endpoint: str | None) -> str:
    """The address by which peers reach this node: the one it would use towards the rendezvous."""
    if endpoint is None:
        return "127.0.0.1"
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--rdzv-endpoint {endpoint}: expected HOST:PORT", ExitCode.BAD_INPUT)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        # A container's name is known only while it runs, and a node that is cut off knows none: both may come back.
        raise RendezvousLost(endpoint, error) from None
