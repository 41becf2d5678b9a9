"""The launcher's part in a live recovery: it keeps the list of members, and gives each worker its name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from ddp_core.base.errors import UserError
from ddp_core.distributed.addresses import listen_at, store_on
from ddp_core.distributed.members import Members, room_file
from ddp_core.distributed.membership import Membership
from ddp_core.experiment.request import Request

_ANSWER_SECONDS = 30
_LOOPBACK = "127.0.0.1"


def require_live(request: Request, max_nodes: int) -> None:
    """Raises UserError (2) where the workers of this request cannot go on without a lost one."""
    layout, options = request.layout, request.options
    obstacles = {
        "it knows one node only, so far": max_nodes > 1 or layout.nnodes > 1,
        "it has been tried on CPUs only, so far": layout.device != "cpu",
        f"with --shard {layout.shard} a lost process has the only copy of its part": layout.shard != "none",
        "only with the exact reduction do fewer processes compute the same bits": options.reduction != "exact",
        "--launcher spawn replaces no process": options.launcher == "spawn",
    }
    found = next((words for words, is_so in obstacles.items() if is_so), None)
    if found is not None:
        raise UserError(f"--recovery live cannot be had here: {found}; use --recovery restart")


class LiveWorkers:
    """The workers of one node by their names, and the store with the list of members.

    A worker's name is its local rank and how many there were before it in this place: "2.0", then "2.1".
    """

    def __init__(self, count: int, reports: Path) -> None:
        self._store = store_on(listen_at(_LOOPBACK, 0), _ANSWER_SECONDS)
        self._members, self._room = Members(self._store), room_file(reports)
        self._turns = dict.fromkeys(range(count), 0)
        self._ended: set[str] = set()
        self._notes, self._is_unsettled = 0, False
        self._room.unlink(missing_ok=True)
        self._members.begin(map(self.name, range(count)))

    def name(self, local_rank: int) -> str:
        """The name of the worker that has this local rank now."""
        return f"{local_rank}.{self._turns[local_rank]}"

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The variables by which a worker with this environment finds the others."""
        name = self.name(int(environment["LOCAL_RANK"]))
        return {"DDP_MEMBER": name, "DDP_MEMBERS_AT": f"{_LOOPBACK}:{self._store.port}"}

    def rank(self, local_rank: int) -> int | None:
        """The rank of this worker among the members; None for one that has not joined them yet."""
        members, name = self._members.now().members, self.name(local_rank)
        return members.index(name) if name in members else None

    def outlives(self, lost: Collection[int]) -> bool:
        """Whether a member is left without the workers of these local ranks."""
        gone = self._ended | set(map(self.name, lost))
        return any(name not in gone for name in self._members.now().members)

    def replace(self, local_rank: int) -> None:
        """Note that the worker of this local rank has ended; the next one there has another name."""
        self._ended.add(self.name(local_rank))
        self._turns[local_rank] += 1

    @property
    def has_news(self) -> bool:
        """Whether there may be something to decide, though no worker has ended; cheap."""
        return self._is_unsettled or self._members.notes() != self._notes

    def silent(self) -> list[int]:
        """The local ranks of members that have not left their group, though another one has: it has lost a peer."""
        members, left = self._members.now().members, self._members.left()
        still = set(members) - left if left else set()
        return [rank for rank in self._turns if self.name(rank) in still]

    def decide(self) -> Membership | None:
        """Do what the protocol asks of a launcher now; returns the new membership where it has made one."""
        self._notes = self._members.notes()
        waiting = self._members.waiting_of({*map(self.name, self._turns)}.difference(self._members.now().members))
        # Taken away first: who meets under the next membership must not find what was asked under this one.
        made = self._members.next(self._ended, waiting)
        if made is not None or not waiting:
            self._room.unlink(missing_ok=True)
        else:
            self._room.touch()
        self._is_unsettled = made is None and bool(waiting or self._members.left())
        return None if made is None else self._members.replace(made)

    def end(self) -> None:
        """Tell workers that still wait to be taken in that nobody will take them in: the run is over."""
        self._members.end()
