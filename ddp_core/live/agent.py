"""The agent of a live recovery: where a worker or a node is lost, the others go on, and new ones join them."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, cast

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerState

from ddp_core.base.errors import ExitCode
from ddp_core.base.torch_internals import start_again, workers_of
from ddp_core.distributed.processes import end_processes, is_stopped
from ddp_core.distributed.reports import tell_user
from ddp_core.launch.agent import FINAL, FINISHING_SECONDS, Agent
from ddp_core.launch.nodes import HandedOver
from ddp_core.launch.nursery import started_by
from ddp_core.live.meeting import LiveRendezvous
from ddp_core.live.member import stop_file
from ddp_core.live.members import Notes
from ddp_core.live.workers import LiveWorkers

_LAST_SECONDS = 300.0
"""So long a launcher whose workers are done waits for those of other nodes, as torch's does."""
STARTING_ALL_AGAIN = "no group of ranks can go on; the workers of all nodes start again from the newest checkpoint"
WITHOUT_STORE = (
    "the rendezvous does not answer; the ranks train on without it. Until it is back nobody can join, and after a loss "
    "all go back to the newest checkpoint"
)
STORE_IS_BACK = "the rendezvous is back: others can join, and a lost rank lets the others go on"


class LiveAgent(Agent):
    """As `Agent`; but where a worker is lost, the other ones go on, and a new one joins them.

    A signal that asks to stop lets this node leave. All stop on SIGINT, where no other node is left, and where this
    launcher serves the store that the nodes meet at. `patience`: seconds after which a silent process counts as lost.
    """

    _live: LiveWorkers | None = None
    _leaves_on: signal.Signals | None = None
    _leaves_until = 0.0

    def __init__(self, patience: float, *of_agent: Any) -> None:
        super().__init__(*of_agent)
        self._patience = patience

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """See torch. Raises HandedOver where this node has left the others."""
        try:
            result: RunResult = super().run(role)
            return result
        finally:
            if self._live is not None:
                self._live.close()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        Path(stop_file(self._reports)).unlink(missing_ok=True)
        rendezvous = cast(LiveRendezvous, worker_group.spec.rdzv_handler)
        self._compared = rendezvous.first
        self._silent_since: dict[int, float] = {}
        self._killed: set[int] = set()
        self._live = LiveWorkers(rendezvous, worker_group.spec.local_world_size, self._reports)
        return super()._start_workers(worker_group)

    def _ask_to_stop(self) -> None:
        Path(stop_file(self._reports)).touch()

    def _starting(self) -> AbstractContextManager[None]:
        assert self._live is not None
        return started_by(self._nursery, self._live.variables)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._live is not None
        self._tell_of_disk_waits(worker_group)
        state = self._look(worker_group, self._live)
        # Where the others go on, no worker is looked at again in this turn: one that ends meanwhile would end all.
        return super()._monitor_workers(worker_group) if state is None else RunResult(state=state)

    def _look(self, worker_group: WorkerGroup, live: LiveWorkers) -> WorkerState | None:
        """Replace workers that are lost, and decide with the other launchers who goes on.

        HEALTHY where they go on; UNHEALTHY where all nodes start again; None where a worker is done, or has ended in a
        way that ends all.
        """
        processes = workers_of(self)
        try:
            live.await_news()
            codes = {rank: code for rank, process in processes.items() if (code := process.poll()) is not None}
            if live.is_without_store:
                return self._look_without_store(live, codes)
            return self._look_with_store(worker_group, live, codes)
        except DistError:
            if not live.goes_without_store():
                raise
            tell_user(WITHOUT_STORE)
            return WorkerState.HEALTHY

    def _look_with_store(
        self, worker_group: WorkerGroup, live: LiveWorkers, codes: Mapping[int, int]
    ) -> WorkerState | None:
        """See `_look`. `codes`: exit codes of workers by local rank. Raises DistError where the store is lost."""
        node = f"node {worker_group.group_rank}"
        if 0 in codes.values():
            live.end("done")
            return None
        if self._leaves_on is not None:
            self._leave(live, codes, self._leaves_on)
        elif codes:
            if not self._replaces(worker_group, live, codes, node):
                live.end("broken")
                return None
        elif not live.look():
            return WorkerState.HEALTHY
        notes = live.decide()
        if notes.over == "broken":
            return self._all_start_again()
        self._kill_silent(live, notes, node)
        return WorkerState.HEALTHY

    def _look_without_store(self, live: LiveWorkers, codes: Mapping[int, int]) -> WorkerState | None:
        """See `_look`: the group that there is trains on, and a loss ends it; until there is a store again."""
        if self._leaves_on is not None:
            self._leave_on(self._leaves_on)  # nobody could be told who goes on, so all stop
        # Whoever waited to join has ended, too, and is started again when there is a store.
        if any(code == 0 or live.trains(local_rank) for local_rank, code in codes.items()):
            return None
        if live.finds_store():
            if live.is_outdated:
                return self._all_start_again()
            tell_user(STORE_IS_BACK)
        return WorkerState.HEALTHY

    def _all_start_again(self) -> WorkerState:
        tell_user(STARTING_ALL_AGAIN)
        self._remaining_restarts += 1  # torch counts this start
        return WorkerState.UNHEALTHY

    def _replaces(self, worker_group: WorkerGroup, live: LiveWorkers, codes: Mapping[int, int], node: str) -> bool:
        """Start others in the place of workers that have ended; returns whether the others can go on without these."""
        ranks = live.ranks(codes)
        # Taken for lost while it was stopped, it has ended when it saw that.
        outside = [rank for rank, code in codes.items() if code == ExitCode.PEERS_LOST and ranks[rank] is None]
        inside = [code for rank, code in codes.items() if rank not in outside]
        if not may_go_on(inside, self._heard, self._remaining_restarts, len(outside)) or not live.outlives(codes):
            return False
        self._remaining_restarts -= len(codes)
        # The others wait for this, so it comes before anything else.
        live.decide()
        tell_user(*going_on(codes, ranks, node, self._remaining_restarts))
        processes = workers_of(self)
        for local_rank in codes:
            live.next_turn(local_rank)
            # Its loader processes may outlive a worker.
            end_processes([processes[local_rank]], signal.SIGKILL, 0)
            with self._starting():
                worker_group.workers[local_rank].id = start_again(self, local_rank)
        return True

    def _kill_silent(self, live: LiveWorkers, notes: Notes, node: str) -> None:
        """Kill workers that the others have left and wait for: stopped ones (SIGSTOP), and those that hang."""
        processes, now = workers_of(self), time.monotonic()
        silent = {processes[local_rank].pid: local_rank for local_rank in live.silent(notes)}
        self._silent_since = {pid: self._silent_since.get(pid, now) for pid in silent}
        for pid, local_rank in silent.items():
            # A worker that is only slow finds the others gone at its next exchange, and leaves by itself.
            hangs = now - self._silent_since[pid] > self._patience
            if pid in self._killed or not (hangs or is_stopped(pid)):
                continue
            what = f"has not come to the others for {self._patience:g} s" if hangs else "is stopped"
            tell_user(f"rank {live.ranks([local_rank])[local_rank]} ({node}) {what}; it is killed now")
            processes[local_rank].kill()
            self._killed.add(pid)  # a disk that does not answer may keep it alive for a while

    def _leave(self, live: LiveWorkers, codes: Mapping[int, int], asked_by: signal.Signals) -> None:
        """Take this node's workers out of the group at the end of their step.

        Raises HandedOver when the others go on without them, and SignalException where all stop together.
        """
        if not self._leaves_until:
            self._leaves_until = time.monotonic() + FINISHING_SECONDS
            live.leave()
        ranks = live.ranks(codes)
        if any(code == ExitCode.STOPPED and ranks[rank] is not None for rank, code in codes.items()):
            self._leave_on(asked_by)  # all ranks have stopped meanwhile, on another request
        if codes:
            live.outlives(codes)
        notes = live.decide()
        if live.has_left(notes):
            raise HandedOver(asked_by)
        if live.is_alone(notes) or time.monotonic() > self._leaves_until:
            self._leave_on(asked_by)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._live is not None:
            # Else this node, and the others that start again, would come back to the same list.
            self._live.end("broken")
            self._live.close()
            self._live = None
        # All start again, so nobody can be left to the others: a request to stop counts now, and while they meet.
        if self._leaves_on is not None:
            self._leave_on(self._leaves_on)
        super()._restart_workers(worker_group)

    def _exit_barrier(self) -> None:
        assert self._live is not None
        with suppress(DistError):
            self._live.await_others(_LAST_SECONDS, lambda: self._leaves_on is not None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        rendezvous = cast(LiveRendezvous, self._worker_group.spec.rdzv_handler)
        stops_all = rendezvous.meeting.is_host or number in (signal.SIGINT, signal.SIGQUIT)
        if stops_all or self._live is None or self._asked is not None or self._is_ending_workers:
            super()._on_signal(number, frame)
        else:
            # Seen at the next look at the workers; asked twice, this node leaves once.
            self._leaves_on = signal.Signals(number)


def may_go_on(codes: Collection[int], asking: Collection[int], restarts_left: int, outside: int = 0) -> bool:
    """Whether the other workers of a live recovery may go on without those that have ended, as far as these tell.

    `codes`: the exit codes of all workers that have ended, 0 among them. `asking`: the signals that ask to stop; a
    worker that has not begun dies of one. `outside`: how many have ended that the others had taken for lost before.
    Each new worker counts as a new start.
    """
    final = {*FINAL, ExitCode.DONE, ExitCode.PEERS_LOST, *(-number for number in asking)}
    return 0 < len(codes) + outside <= restarts_left and not final.intersection(codes)


def going_on(codes: Mapping[int, int], ranks: Mapping[int, int | None], node: str, restarts_left: int) -> list[str]:
    """The lines about workers without which the others go on.

    `codes`: exit codes by local rank, minus the signal's number for a killed worker. `ranks`: by local rank, None for a
    worker that had not joined the others yet.
    """
    words = []
    for local_rank, code in sorted(codes.items()):
        rank = ranks[local_rank]
        who = f"rank {rank} ({node})" if rank is not None else f"a new worker ({node})"
        what = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
        words.append(f"{who} {what}; the others go on, and a new worker joins them ({restarts_left} more allowed)")
    return words
