"""The list of members in a store, and what a process does to be one: the protocol of membership.py on a real store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.distributed.membership import Membership, must_leave, next_membership
from ddp_core.distributed.world import World

_MEMBERSHIP = "members/now"
_OVER = "members/over"
_NOTES = "members/notes"
_ROOM_FILE = "make-room"
_POLL_SECONDS = 0.005
_ASKED_SECONDS = 2.0
"""So long a process that was asked to stop still waits for the others: they may meet, and save what they have."""
_LATE_SECONDS = 10.0
"""What a launcher may take to decide, beyond the time after which a silent process counts as lost."""


class Members:
    """The list of members in a store, as all launchers and members see it."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def begin(self, names: Iterable[str]) -> None:
        """Write the first membership, unless there is one."""
        self._store.compare_set(_MEMBERSHIP, "", Membership(0, tuple(names)).to_text())

    def now(self) -> Membership:
        """The newest membership."""
        return Membership.from_text(self._store.get(_MEMBERSHIP))

    def next(self, ended: Collection[str], waiting: Collection[str]) -> tuple[Membership, Membership] | None:
        """The newest membership and the one to follow; None where all stays. See `next_membership`."""
        now = self.now()
        following = next_membership(now, ended, self._noted("left", now), waiting)
        return None if following is None else (now, following)

    def replace(self, made: tuple[Membership, Membership]) -> Membership | None:
        """Put the second membership in the place of the first; returns it, or None where somebody was quicker."""
        before, following = made
        stored = self._store.compare_set(_MEMBERSHIP, before.to_text(), following.to_text())
        return following if Membership.from_text(stored) == following else None

    def end(self) -> None:
        """Note that the run is over: nobody is taken in any more."""
        self._store.set(_OVER, "1")

    @property
    def is_over(self) -> bool:
        """Whether the run is over."""
        return bool(self._store.check([_OVER]))

    def note(self, what: str, number: int, name: str) -> None:
        """Note that a process has left the group of this number, or is here for it."""
        self._store.set(f"members/{what}/{number}/{name}", "1")
        self._store.add(_NOTES, 1)

    def ask(self, name: str) -> None:
        """Note that a new process is ready to be taken in."""
        self._store.set(f"members/waiting/{name}", "1")
        self._store.add(_NOTES, 1)

    def notes(self) -> int:
        """How much processes have noted until now: one look tells whether there is anything new."""
        return int(self._store.add(_NOTES, 0))

    def left(self) -> set[str]:
        """The members that have left the group of the newest membership."""
        return self._noted("left", self.now())

    def are_here(self, now: Membership) -> bool:
        """Whether all members are here for the group of this membership."""
        return len(self._noted("here", now)) == len(now.members)

    def waiting_of(self, names: Iterable[str]) -> set[str]:
        """Those of these new processes that are ready to be taken in."""
        return {name for name in names if self._store.check([f"members/waiting/{name}"])}

    def _noted(self, what: str, now: Membership) -> set[str]:
        return {name for name in now.members if self._store.check([f"members/{what}/{now.number}/{name}"])}


class Seat:
    """One process's place among the members, which changes with each membership.

    `world`: what the launcher has given. `timeout`: seconds after which a silent process counts as lost. Raises
    UserError (6) where the store does not answer.
    """

    def __init__(self, world: World, timeout: float) -> None:
        assert world.member is not None
        assert world.members_at is not None
        self._name, self._given, self._patience = world.member, world, timeout + _LATE_SECONDS
        host, _, port = world.members_at.rpartition(":")
        self._address = host, int(port)
        try:
            store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=self._patience))
        except dist.DistError:
            self._give_up("the launcher's store does not answer")
        self._members = Members(store)
        self.number = -1
        """Of the newest membership that this process has belonged to; -1 before the first one."""
        self.members: tuple[str, ...] = ()
        """Of the group that this process is in, in the order of ranks."""

    def take(self, is_asked_to_stop: Callable[[], bool]) -> World | None:
        """Wait for a newer membership of which all members are here; returns this process's place in it.

        None for a new process that nobody takes in any more, because the run is over. Raises UserError (6) where this
        process is not a member any more, and where the others do not come in time.
        """
        try:
            if self.number < 0 and self._name not in self._members.now().members:
                self._await_invitation()
            deadline, is_here = time.monotonic() + self._patience, False
            while True:
                now = self._members.now()
                if self._name not in now.members:
                    if self.number < 0:
                        return None
                    self._give_up("the others go on without this process, which they have taken for lost")
                if must_leave(self.number, now):
                    self.number = now.number
                    self._members.note("here", self.number, self._name)
                    deadline, is_here = time.monotonic() + self._patience, True
                if is_here and self._members.are_here(now):
                    return self._placed(now)
                if is_asked_to_stop():
                    deadline = min(deadline, time.monotonic() + _ASKED_SECONDS)
                if time.monotonic() > deadline:
                    self._give_up("the others have not met again in time")
                time.sleep(_POLL_SECONDS)
        except dist.DistError:
            self._give_up("the launcher's store does not answer")

    def _await_invitation(self) -> None:
        """Wait, as a new process, until the others have made room, or the run is over."""
        self._members.ask(self._name)
        while self._name not in self._members.now().members and not self._members.is_over:
            time.sleep(_POLL_SECONDS)

    def leave(self) -> None:
        """Note that this process has left its group."""
        try:
            self._members.note("left", self.number, self._name)
        except dist.DistError:
            self._give_up("the launcher's store does not answer")

    @property
    def makes_room(self) -> bool:
        """Whether the launcher asks to make room for a new process; a look at a file, since each step asks."""
        assert self._given.report_dir is not None
        return os.path.exists(room_file(self._given.report_dir))  # noqa: PTH110 - a third of the time of a Path

    def _placed(self, now: Membership) -> World:
        self.members = now.members
        rank, count = now.members.index(self._name), len(now.members)
        host, port = self._address
        return replace(
            self._given,
            rank=rank,
            world_size=count,
            local_rank=rank,
            nproc_per_node=count,
            store_host=host,
            store_port=port,
            agent_serves_store=True,
            membership=now.number,
        )

    def _give_up(self, why: str) -> NoReturn:
        raise UserError(f"process {self._name}: {why}; continue with --resume auto", ExitCode.PEERS_LOST)


def room_file(reports: Path) -> Path:
    """The file by which a launcher asks its workers to make room for a new process at the end of their step."""
    return reports / _ROOM_FILE
