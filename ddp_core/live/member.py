"""What a process does to be a member, and to stay one: it notes where it stands, and waits for the others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import replace_file
from ddp_core.distributed.world import World
from ddp_core.live.members import Members, store_again_at, store_at
from ddp_core.live.membership import Membership, must_leave, node_of, place_among

_POLL_SECONDS = 0.005
_ASKED_SECONDS = 2.0
"""So long a process that was asked to stop still waits for the others: they may meet, and save what they have."""
_LATE_SECONDS = 10.0
"""What a launcher may take to decide, beyond the time after which a silent process counts as lost."""
_NO_ANSWER = "the store with the list of members does not answer"


class Member:
    """One process's place among the members, which changes with each membership.

    `world`: what the launcher has given. `timeout`: seconds after which a silent process counts as lost. Raises
    UserError (6) where the store does not answer.
    """

    def __init__(self, world: World, timeout: float) -> None:
        assert world.member is not None
        assert world.members_at is not None
        self._name, self._given, self._patience = world.member, world, timeout
        try:
            self._members = Members(store_at(world.members_at, timeout + _LATE_SECONDS))
        except dist.DistError:
            self._give_up(_NO_ANSWER)
        self.number = -1
        """The number of the newest membership that this process has belonged to; -1 before the first one."""
        self.members: tuple[str, ...] = ()
        """The members of the group that this process is in, in the order of ranks."""
        self.leaving: frozenset[int] = frozenset()
        """The nodes that were asked to leave before this group met."""
        self._step = -1

    @property
    def comes_late(self) -> bool:
        """Whether there is a group already, which this process has yet to join."""
        try:
            return self.number < 0 and self._name not in self._members.now().members
        except dist.DistError:
            self._give_up(_NO_ANSWER)

    def take(self, is_asked_to_stop: Callable[[], bool]) -> World | None:
        """Wait for a newer membership of which all members are here; returns this process's place in it.

        None where the run is over. Raises UserError: 6 where this process is not a member any more, and where the
        others do not come in time; 75 where its node has left the others.
        """
        try:
            if self.comes_late:
                self._members.note("asked", self._name)
                while not (notes := self._members.read()).over and self._name not in notes.now.members:
                    time.sleep(_POLL_SECONDS)
            return self._meet(is_asked_to_stop)
        except dist.DistError:
            self._give_up(_NO_ANSWER)

    def _meet(self, is_asked_to_stop: Callable[[], bool]) -> World | None:
        deadline, is_here = time.monotonic() + self._patience + _LATE_SECONDS, False
        while True:
            notes = self._members.read()
            now = notes.now
            if notes.over == "done":
                return None
            if notes.over:
                self._give_up("no group of ranks can go on")
            if self._name not in now.members:
                if node_of(self._name) in notes.leaving and self._name not in notes.ended:
                    raise UserError(f"process {self._name}: its node has left, as it was asked to", ExitCode.STOPPED)
                self._give_up("the others go on without this process, which they have taken for lost")
            if must_leave(self.number, now):
                self.number = now.number
                self._members.note_here(self.number, self._name)
                deadline, is_here = time.monotonic() + self._patience, True
            others_left = is_here and bool(notes.left)
            if is_here and not others_left and self._members.are_here(now):
                self.leaving = notes.leaving
                return self._placed(now)
            if is_asked_to_stop():
                deadline = min(deadline, time.monotonic() + _ASKED_SECONDS)
            if others_left or time.monotonic() > deadline:
                if not is_here:
                    self._give_up("the others have not met again in time")
                # Somebody is silent; or this process came after another one had left. A launcher decides who goes on,
                # once all have left this group.
                self.leave(self._step)
                deadline, is_here = time.monotonic() + self._patience + _LATE_SECONDS, False
            time.sleep(_POLL_SECONDS)

    def leave(self, step: int) -> None:
        """Note that this process has left its group, and holds the state after this step (-1: none)."""
        self._step = step
        try:
            self._members.note_left(self.number, self._name, step)
        except dist.DistError:
            assert self._given.members_at is not None
            try:  # another store may have taken the place of one that was lost
                self._members = Members(store_again_at(self._given.members_at, self._patience + _LATE_SECONDS))
                self._members.note_left(self.number, self._name, step)
            except (dist.DistError, OSError):
                self._give_up(_NO_ANSWER)

    @property
    def makes_room(self) -> bool:
        """Whether the launcher asks to meet anew at the end of the step; a look at a file, since each step asks."""
        assert self._given.report_dir is not None
        file = room_file(self._given.report_dir)
        # A third of the time of a Path. The file may still ask this of the group before.
        return os.path.exists(file) and Path(file).read_text() == str(self.number)  # noqa: PTH110

    @property
    def is_left_behind(self) -> bool:
        """Whether there is a newer membership, so that this group has lost a member. Asks the store."""
        try:
            return must_leave(self.number, self._members.now())
        except dist.DistError:
            self._give_up(_NO_ANSWER)

    def _placed(self, now: Membership) -> World:
        self.members = now.members
        # The launcher must know it also where the store is lost before it has read of this group.
        assert self._given.report_dir is not None
        replace_file(group_file(self._given.report_dir, self._name), now.to_text())
        nproc_per_node, local_rank = place_among(now, self._name)
        return replace(
            self._given,
            rank=now.members.index(self._name),
            world_size=len(now.members),
            local_rank=local_rank,
            nproc_per_node=nproc_per_node,
            membership=now.number,
            started_as=self._given.local_rank,
        )

    def _give_up(self, why: str) -> NoReturn:
        raise UserError(f"process {self._name}: {why}; continue with --resume auto", ExitCode.PEERS_LOST)


def room_file(reports: Path) -> str:
    """The file by which a launcher asks its workers to meet anew at the end of their step.

    It holds the number of the membership that they are to leave.
    """
    return f"{reports}/make-room"


def stop_file(reports: Path) -> str:
    """The file that a launcher writes before it asks its workers to stop; see `StopRequest`."""
    return f"{reports}/stop"


def group_file(reports: Path, name: str) -> Path:
    """The file in which the process of this name tells its launcher in which group it trains: a Membership's text."""
    return reports / f"group-of-{name}"
