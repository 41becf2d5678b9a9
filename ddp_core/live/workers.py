"""The launcher's part in a live recovery: with the others it keeps the list of members, and it names its workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from torch.distributed import DistError

from ddp_core.distributed.reports import tell_user
from ddp_core.live.lines import Lines
from ddp_core.live.meeting import LiveRendezvous
from ddp_core.live.member import group_file, room_file
from ddp_core.live.members import Members, Notes, Over, store_at
from ddp_core.live.membership import Membership, ended_with, lost_in_silence, name_of, node_of

_ANSWER_SECONDS = 30
_TOGETHER_SECONDS = 0.2
"""Whoever asks several nodes to leave asks them within this time; where none is left, all stop together."""
_POLL_SECONDS = 0.05
_CHANGING_SECONDS = 0.005
"""Between two looks whether somebody has noted something, where a change is under way."""


class LiveWorkers:
    """The workers of one node by their names, and the launcher's place among the others.

    `rendezvous`: where the nodes have met. `count`: this node's workers; `reports`: the folder that it shares with
    them.
    """

    def __init__(self, rendezvous: LiveRendezvous, count: int, reports: Path) -> None:
        self._rendezvous, self._node, self._reports = rendezvous, rendezvous.node, reports
        self._members_at = rendezvous.members_at
        self._members = Members(store_at(self._members_at, _ANSWER_SECONDS), rendezvous.meeting.max_nodes)
        self._room = Path(room_file(reports))
        self._turns = dict.fromkeys(range(count), 0)
        self._seen, self._is_unsettled = -1, False
        self._known = Membership(-1, ())
        self._nodes = 1 + max(self._node, *rendezvous.first)
        self._ended: set[str] = set()
        self._over: Over = ""
        self._told: set[int] = set()
        self._asked_at: float | None = None
        self._search: threading.Event | None = None
        self._room.unlink(missing_ok=True)
        for name in map(self.name, self._turns):
            group_file(reports, name).unlink(missing_ok=True)
        self._lines = Lines(self._node, rendezvous.address, self._members)

    def name(self, local_rank: int) -> str:
        """The name of the worker that has this local rank now."""
        return name_of(self._node, local_rank, self._turns[local_rank])

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The variables by which a worker with this environment finds the others."""
        return {"DDP_MEMBER": self.name(int(environment["LOCAL_RANK"])), "DDP_MEMBERS_AT": self._members_at}

    def ranks(self, local_ranks: Iterable[int]) -> dict[int, int | None]:
        """The ranks of these workers among the members; None for one that is not a member, or not yet."""
        members = self._members.now().members
        names = {local_rank: self.name(local_rank) for local_rank in local_ranks}
        return {rank: members.index(name) if name in members else None for rank, name in names.items()}

    def outlives(self, lost: Collection[int]) -> bool:
        """Whether a member is left without the workers of these local ranks; notes that they have ended."""
        if names := {*map(self.name, lost)} - self._ended:
            self._ended |= names
            self._members.note("ended", *sorted(names))
        return bool(self._members.read().alive)

    def next_turn(self, local_rank: int) -> None:
        """Give the next worker with this local rank another name."""
        self._turns[local_rank] += 1

    def await_news(self) -> None:
        """Wait for a moment; not so long where a change is under way, and somebody notes something.

        Raises DistError where the store is lost.
        """
        until = time.monotonic() + _POLL_SECONDS
        while (left := until - time.monotonic()) > 0:
            if self._search is not None or not self._is_unsettled:
                time.sleep(left)
            elif self._members.count() == self._seen:
                time.sleep(_CHANGING_SECONDS)
            else:
                return

    def look(self) -> bool:
        """Whether there may be something to decide; cheap."""
        return self._lines.look() or self._is_unsettled or self._members.count() != self._seen

    def decide(self) -> Notes:
        """Do what the protocol asks of a launcher now, and tell the user of nodes; returns what is known."""
        self._seen = self._members.count()
        notes = self._members.read()
        self._lines.reach(notes.launchers)
        # Whoever has been heard since this launcher last listened, which may be long ago, is not silent.
        self._lines.look()
        self._nodes = max(self._nodes, *(1 + node for node in notes.launchers))
        if notes.over:
            return notes
        if set(map(node_of, notes.alive)) <= notes.launchers.keys():
            self._members.give_numbers_again()
        missing = set(map(node_of, notes.alive)) - {self._node}
        closed, silent = self._lines.closed, self._lines.silent(missing)
        lost = lost_in_silence(notes.now, silent, notes.ended, notes.left)
        ended = lost | ended_with({*notes.now.members, *notes.waiting}, closed)
        if ended - notes.ended:
            self._members.note("ended", *sorted(ended - notes.ended))
            notes = self._members.read()
        following = notes.following
        if following is not None:
            self._is_unsettled = not self._members.replace(notes.now, following)
            self._seen = -1
        else:
            self._ask_for_room(notes)
            self._is_unsettled = bool(notes.waiting or notes.left or self._node in notes.leaving)
        # The others wait for what is decided, so it comes before the words.
        self._tell(closed - notes.leaving, "is lost: its launcher has ended")
        self._tell(set(map(node_of, lost)), "is lost: nothing comes from it or its launcher")
        self._tell(notes.leaving - set(map(node_of, notes.now.members)), "has left, as it was asked to")
        self._known = notes.now
        if not notes.alive:
            self.end("broken")
            return self._members.read()
        return notes

    def _ask_for_room(self, notes: Notes) -> None:
        """Ask this node's workers to meet anew, for a new process or because this node leaves; or take that back."""
        is_leaving = self._asked_at is not None and time.monotonic() - self._asked_at > _TOGETHER_SECONDS
        if notes.waiting or (is_leaving and not self.is_alone(notes)):
            self._room.write_text(str(notes.now.number))
        else:
            self._room.unlink(missing_ok=True)

    def _tell(self, nodes: Collection[int], what: str) -> None:
        for node in sorted(set(nodes) - self._told - {self._node}):
            ranks = [str(rank) for rank, name in enumerate(self._known.members) if node_of(name) == node]
            if ranks:
                self._told.add(node)
                tell_user(f"node {node} (rank {', '.join(ranks)}) {what}; the others go on")

    def leave(self) -> None:
        """Tell all that this node was asked to leave."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._members.note("leaving", self._node)

    def is_alone(self, notes: Notes) -> bool:
        """Whether no member would be left without the nodes that were asked to leave: then all stop instead."""
        return all(node_of(name) in notes.leaving for name in notes.alive)

    def has_left(self, notes: Notes) -> bool:
        """Whether no member is on this node."""
        return all(node_of(name) != self._node for name in notes.now.members)

    def silent(self, notes: Notes) -> list[int]:
        """The local ranks of members that have not left their group, though another one has: it has lost a peer."""
        still = set(notes.alive).difference(notes.left) if notes.left else set()
        return [rank for rank in self._turns if self.name(rank) in still]

    def end(self, how: Over) -> None:
        """Tell all that this list of members does not count any more."""
        if not self._over:
            self._over = how
            self._members.note("over", how)

    @property
    def is_without_store(self) -> bool:
        """Whether the store has been lost, and the workers train on without it."""
        return self._search is not None

    def goes_without_store(self) -> bool:
        """Whether the workers can train on now that the store is lost: those do that are in a group already."""
        if not self._rendezvous.can_be_lost or self._over or self._group() is None:
            return False
        # Without a store no rank can leave its group to meet anew.
        self._room.unlink(missing_ok=True)
        self._search = self._search or self._rendezvous.search()
        return True

    def trains(self, local_rank: int) -> bool:
        """Whether the worker with this local rank has been in a group, as far as itself has told."""
        return group_file(self._reports, self.name(local_rank)).exists()

    def _group(self) -> Membership | None:
        """The newest group in which a worker of this node trains; None where none does."""
        files = [group_file(self._reports, name) for name in map(self.name, self._turns) if name not in self._ended]
        groups = [Membership.from_text(file.read_text()) for file in files if file.exists()]
        return max(groups, default=None)

    def finds_store(self) -> bool:
        """Whether there is a store again, and this launcher's notes are in it; see `is_outdated`, too.

        Raises DistError where it is lost again.
        """
        assert self._search is not None
        if not self._search.is_set():
            return False
        self._search = self._rendezvous.search()  # for the next time, where this one fails
        offered = self._group()
        if offered is None or not self._rendezvous.find_again():
            return False
        members = self._rendezvous.renew(offered, self._nodes)
        if members is None:
            self._over = "broken"
        else:
            self._members = members
            if self._ended:
                members.note("ended", *sorted(self._ended))
            self._lines.tell(members)
        self._search.set()
        self._search, self._seen = None, -1
        return True

    @property
    def is_outdated(self) -> bool:
        """Whether others train without us since the store was lost."""
        return self._over == "broken"

    def await_others(self, seconds: float, is_asked: Callable[[], bool]) -> None:
        """Wait until the workers of all other nodes are done, too; not when `is_asked` to leave."""
        self._members.note("finished", self._node)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not is_asked():
            self._lines.look()
            notes = self._members.read()
            if set(map(node_of, notes.alive)) <= notes.finished | self._lines.closed:
                return
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Let the other launchers see that this one is gone. Where it is the last one, the list counts no more."""
        if self._search is not None:
            self._search.set()
        with suppress(DistError):
            notes = self._members.read()
            others = set(map(node_of, notes.alive)) - {self._node} - notes.leaving - self._lines.closed
            if not notes.over and not others:
                self.end("broken")
        self._lines.close()
