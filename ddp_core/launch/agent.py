"""torchrun's agent with our rules: what it does when workers have failed, and how it finds out what happened."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from ddp_core.base.errors import ExitCode
from ddp_core.base.torch_internals import workers_of
from ddp_core.distributed.processes import DiskWaits, Process, await_processes, end_processes, is_stopped
from ddp_core.distributed.reports import Report, clear_reports, read_reports, tell_user
from ddp_core.launch.meeting import require_same_request
from ddp_core.launch.nursery import Nursery, started_by

FINISHING_SECONDS = 25
"""How long workers that were asked to stop may take to finish their step and save it."""
_LEAVING_SECONDS = 8
"""How long workers may take to end after a loss: they have nothing to finish."""
MAKING_ROOM = "another node has come; the workers save and start again with it"
FINAL = frozenset(ExitCode) - {ExitCode.DONE, ExitCode.PEERS_LOST}
"""The exit codes of workers to which a new start would only bring the same end."""
_REPORT_SECONDS = 1.0
_DISK_SECONDS = 15.0
"""After so long a wait for a disk, or for a file server, the user is told."""
_STALE_SECONDS = 1.2
"""The answers of torch's rendezvous are up to a second old (_BackendRendezvousStateHolder, cache_duration)."""


class WouldRepeat(Exception):
    """A worker ended with an error that a new start would only repeat."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.message)
        self.report = report


class Agent(LocalElasticAgent):
    """Starts, watches and ends this node's workers. torch calls every method here but `kill_workers`.

    The workers come from the nursery, where there is one, and leave their reports in the directory `reports`. `facts`:
    what all nodes must have in common. While the agent runs, the first of the signals `heard` ends it with
    SignalException, once the workers have ended; a later SIGINT kills them.
    """

    _compared: Sequence[int] | None = None
    """The nodes that must have the same request as this one; None for all."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs: DefaultLogsSpecs,
        reports: Path,
        nursery: Nursery | None,
        heard: Sequence[signal.Signals],
        facts: Mapping[str, str],
    ) -> None:
        super().__init__(spec, logs)
        self._reports, self._nursery, self._heard, self._facts = reports, nursery, heard, facts
        self._asked: signal.Signals | None = None
        self._is_ending_workers = False
        self._disk_waits = DiskWaits(_DISK_SECONDS)

    def kill_workers(self) -> None:
        """SIGKILL to all of this node's workers, from any thread."""
        for process in workers_of(self).values():
            process.kill()

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        for number in self._heard:
            signal.signal(number, self._on_signal)
        try:
            result: RunResult = super()._invoke_run(role)
        except (RendezvousConnectionError, DistError):
            # Printed before anything else is done: the workers may take long to finish their step and save it.
            tell_user("the rendezvous does not answer; the workers save and leave, to meet again when it is back")
            raise
        return result

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # Reports of the round before say nothing about the workers that start now.
        clear_reports(self._reports)
        require_same_request(worker_group, self._facts, self._compared)
        with self._starting():
            started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._tell_of_disk_waits(worker_group)
        explained = self._end_after_failure(worker_group)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._remaining_restarts, words = self._decide(worker_group, result, explained)
            tell_user(*words)
        return result

    def _starting(self) -> AbstractContextManager[None]:
        """A block in which workers are started, from the nursery where there is one."""
        return started_by(self._nursery)

    def _end_after_failure(self, worker_group: WorkerGroup) -> bool:
        """End the workers if one of them has failed; returns whether the user was told what happened to it."""
        processes = workers_of(self)
        workers = {worker.global_rank: processes[worker.local_rank] for worker in worker_group.workers}
        codes = _failed(workers)
        if not codes:
            return False
        if has_waited := set(codes.values()) == {ExitCode.PEERS_LOST}:
            # A killed worker's connections are closed before it is gone: a peer may have noticed that, and left, first.
            await_processes(workers.values(), _REPORT_SECONDS)
            codes = _failed(workers)
        for number in self._heard:
            if -number in codes.values():
                # The signal may have been sent to every process of this launch, and have ended a worker that had not
                # begun before this launcher hears it.
                self._leave_on(number)
        stopped = [rank for rank, process in workers.items() if is_stopped(process.pid)]
        lost = losses(codes, stopped, f"node {worker_group.group_rank}")
        tell_user(*lost)
        if not has_waited:
            # Every worker notices by itself that a peer is gone, and needs a moment to write its report.
            await_processes(workers.values(), _REPORT_SECONDS)
        self._ask_to_stop()
        end_processes(workers.values(), signal.SIGTERM, patience(codes.values()))
        return bool(lost)

    def _ask_to_stop(self) -> None:
        """Called before workers are asked to stop."""

    def _tell_of_disk_waits(self, worker_group: WorkerGroup) -> None:
        processes = workers_of(self)
        ranks = {processes[worker.local_rank].pid: worker.global_rank for worker in worker_group.workers}
        if late := self._disk_waits.found(ranks):
            words = ", ".join(f"rank {ranks[pid]}" for pid in sorted(late, key=ranks.__getitem__))
            tell_user(
                f"{words} (node {worker_group.group_rank}) has had no answer from a disk or a file server for "
                f"{_DISK_SECONDS:.0f} s; the run goes on when that answers, and cannot be ended before"
            )

    def _decide(self, worker_group: WorkerGroup, result: RunResult, explained: bool) -> tuple[int, list[str]]:
        reports = read_reports(self._reports)
        codes = {failure.exitcode for failure in result.failures.values()} | {report.exit_code for report in reports}
        reason = reports[0].message if reports and not explained else None
        world_is_local = worker_group.workers[0].world_size == worker_group.spec.local_world_size
        room = may_make_room(codes, world_is_local) and self._node_waits(worker_group)
        return after_failure(codes, reason, room, self._remaining_restarts)

    def _node_waits(self, worker_group: WorkerGroup) -> bool:
        """Whether a node waits to be taken in. Raises RendezvousConnectionError where the rendezvous is gone."""
        deadline = time.monotonic() + _STALE_SECONDS
        while not (waiting := worker_group.spec.rdzv_handler.num_nodes_waiting()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return bool(waiting)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:
            # Healthy workers start again because another node waits to be taken in.
            tell_user(MAKING_ROOM)
            self._stop_workers(worker_group)
            reports = read_reports(self._reports)
            if reports and would_repeat(reports[0].exit_code):
                raise WouldRepeat(reports[0])
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        super()._stop_workers(worker_group)
        # A signal that came meanwhile counts now, before the workers start again or the agent tells its result.
        self._is_ending_workers = False
        if self._asked is not None:
            self._leave_on(self._asked)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *timeout: Any, **named_timeout: Any) -> None:
        self._is_ending_workers = True
        self._ask_to_stop()
        # SIGQUIT (Ctrl-backslash) also asks this launcher to stop, but workers do not handle it.
        asking = signal.SIGTERM if death_sig == signal.SIGQUIT else death_sig
        end_processes(workers_of(self).values(), asking, FINISHING_SECONDS)
        # The workers have ended. torch 2.11 gives no timeout, and takes none.
        super()._shutdown(death_sig, *timeout, **named_timeout)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._asked is not None:
            if number == signal.SIGINT:
                self.kill_workers()
        elif self._is_ending_workers:
            self._asked = signal.Signals(number)
        else:
            self._leave_on(signal.Signals(number))

    def _leave_on(self, number: signal.Signals) -> NoReturn:
        self._asked = number
        raise SignalException(f"asked to stop by {number.name}", number)

    @property
    def died_of(self) -> set[int]:
        """The signals that have killed workers of this node; 0 for a worker that ended by itself."""
        return {max(0, -(process.poll() or 0)) for process in workers_of(self).values()}


def _failed(workers: Mapping[int, Process]) -> dict[int, int]:
    """The exit codes, by rank, of the workers that have ended with another one than 0."""
    return {rank: code for rank, process in workers.items() if (code := process.poll())}


def losses(codes: Mapping[int, int], stopped: Collection[int], node: str) -> list[str]:
    """A line about each worker that can write no report itself: one that a signal has killed or stopped (SIGSTOP)."""
    lost = {rank: f"was killed ({signal.Signals(-code).name})" for rank, code in codes.items() if code < 0}
    lost |= dict.fromkeys(stopped, "is stopped; it is killed now")
    return [f"rank {rank} ({node}) {what}" for rank, what in sorted(lost.items())]


def patience(codes: Collection[int]) -> int:
    """Seconds that the other workers get to leave, by the exit codes of those that have failed."""
    return FINISHING_SECONDS if FINAL.intersection(codes) else _LEAVING_SECONDS


def may_make_room(codes: Collection[int], world_is_local: bool) -> bool:
    """Whether workers that saved and left may have been asked to by another node's launcher, to take in a new node."""
    return ExitCode.STOPPED in codes and not world_is_local


def after_failure(codes: Collection[int], reason: str | None, room: bool, restarts_left: int) -> tuple[int, list[str]]:
    """When workers have failed and the others were ended: the restarts that torch's agent has, and lines for the user.

    torch's agent starts the workers again where restarts are left, and takes one away. `codes`: exit codes, also those
    in the reports: a worker that has reported why it leaves may be killed before it has left. `reason`: the message of
    the most telling report, None where the user has been told already. `room`: workers may have left to take in a node
    (`may_make_room`), and a node does wait.
    """
    if room:
        # The workers have saved, to start again with the node that waits, which is not counted.
        return restarts_left + 1, [MAKING_ROOM]
    if restarts_left == 0 or FINAL.intersection(codes):
        return 0, []
    said = [] if reason is None else [reason.removesuffix("; continue with --resume auto")]
    left = restarts_left - 1
    said.append(f"starting the workers again from the last checkpoint ({left} more restarts allowed)")
    return restarts_left, said


def would_repeat(code: int) -> bool:
    """Whether what ended a healthy worker, while a node waits, would only come to the same end with that node.

    A worker may have failed meanwhile: the waiting node may be a peer that lost a worker of ours, and noticed before
    this launcher did. `code`: that in the most telling report.
    """
    return code in FINAL - {ExitCode.STOPPED}
