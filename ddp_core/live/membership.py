"""Who trains together after a loss, as a protocol of pure functions: no clock, no store, no process.

A membership is a number and the names of the processes that train together, in the order of their ranks. A store has
the newest one, and a launcher replaces it by one compare-and-set. What launchers and ranks then do follows from the
functions here; tests/core/live/test_membership.py runs them through every sequence of losses and arrivals of a
small launch. docs/explanation/recovery.md describes the protocol.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple


class Membership(NamedTuple):
    """The processes that train together; every change makes the next number."""

    number: int
    members: tuple[str, ...]
    """Their names in the order of their ranks. A name is never used twice in one launch."""

    def to_text(self) -> str:
        """As it stands in the store."""
        return json.dumps(self)

    @classmethod
    def from_text(cls, text: str | bytes) -> Membership:
        """What `to_text` returned."""
        number, members = json.loads(text)
        return cls(number, tuple(members))


class Progress(NamedTuple):
    """How far the state is that a process holds; the greater one is the newer one."""

    step: int
    """Finished steps."""
    is_settled: bool
    """Whether what follows the update of that step is done, too: an evaluation, a digest, a save. Rank 0 alone knows
    it, since it alone writes; another rank does these again, if rank 0 is lost before the next step."""


def name_of(node: int, local_rank: int, turn: int) -> str:
    """The name of the process with this local rank on a node, after `turn` others in its place: "2.1@0"."""
    return f"{local_rank}.{turn}@{node}"


def node_of(name: str) -> int:
    """The node of the process with this name."""
    return int(name.partition("@")[2])


def place_among(now: Membership, name: str) -> tuple[int, int]:
    """The number of ranks on each node, and the local rank of this member.

    Where the nodes have unlike numbers of members, each member counts as a node of its own.
    """
    mine = [member for member in now.members if node_of(member) == node_of(name)]
    if len(set(Counter(map(node_of, now.members)).values())) > 1:
        return 1, 0
    return len(mine), mine.index(name)


def next_membership(
    now: Membership,
    ended: Collection[str],
    left: Mapping[str, int],
    waiting: Collection[str],
    leaving: Collection[int] = (),
) -> Membership | None:
    """The membership that follows, decided by a launcher; None where nothing is to be changed, or nobody is left.

    `ended`: processes that are known to have ended. `left`: the finished steps that each member held when it left the
    group of `now`, because an exchange failed or to make room; -1 for no state. `waiting`: new processes that are ready
    to be taken in. `leaving`: the nodes that were asked to leave.

    A process that has ended is left out at once. Where nobody has ended, all members must have left first: one that
    still trains is not interrupted, and one that is silent is not taken for dead. A node that was asked to leave stays
    while its state is newer than the others', and where nobody else would be left.
    """
    alive = [name for name in now.members if name not in ended]
    if not alive:
        return None
    have_left = all(name in left for name in alive)
    if have_left:
        staying = [name for name in alive if node_of(name) not in leaving]
        if staying and max(left[name] for name in staying) >= max(left[name] for name in alive):
            alive = staying
    elif len(alive) == len(now.members):
        return None
    new = [
        name
        for name in sorted(waiting)
        if name not in ended and name not in now.members and node_of(name) not in leaving
    ]
    return Membership(now.number + 1, _side_by_side((*alive, *new)))


def _side_by_side(names: Sequence[str]) -> tuple[str, ...]:
    """The processes of each node beside each other; the first one stays the first."""
    nodes = list(dict.fromkeys(map(node_of, names)))
    return tuple(sorted(names, key=lambda name: nodes.index(node_of(name))))


def ended_with(names: Iterable[str], nodes: Collection[int]) -> set[str]:
    """Which of these processes have ended with their launchers: those on `nodes`, whose launchers are known to have."""
    return {name for name in names if node_of(name) in nodes}


def lost_in_silence(now: Membership, silent: Collection[int], ended: Collection[str], left: Iterable[str]) -> set[str]:
    """The members that count as ended, because they and their launchers are silent; they are fenced out from then on.

    `silent`: the nodes whose launchers are silent. Every other member must have left first, so nobody is interrupted.
    """
    alive = set(now.members) - set(ended)
    missing = alive - set(left)
    return missing if all(node_of(name) in silent for name in missing) else set()


def renewed(stored: Membership | None, offered: Membership) -> Membership | None:
    """The membership that counts in a store that was lost and is back; None where all must start again.

    `stored`: what the store has, if it is not empty. `offered`: the group in which a launcher's own processes train,
    who may be the first to come back. Of two that differ the newer one counts; two with the same number are of groups
    that know nothing of each other.
    """
    if stored is None or stored.number < offered.number:
        return offered
    return stored if stored.number > offered.number or stored == offered else None


def must_leave(mine: int, now: Membership) -> bool:
    """Whether a process must give up the membership of number `mine`, because a newer one counts now."""
    return now.number > mine


def newest_holder(held: Sequence[Progress | None]) -> int | None:
    """The rank whose state all take: the newest one, of several the lowest rank's; None where no rank holds any.

    `held`: what each rank holds, by rank.
    """
    known = [(each, -rank) for rank, each in enumerate(held) if each is not None]
    return -max(known)[1] if known else None


def goes_back_to_checkpoint(newest: Progress | None, checkpoint: int | None) -> bool:
    """Whether the checkpoint of this step (None: there is none) is newer than any state that a process holds.

    A rank may save a step and die, when no other rank has finished that step yet.
    """
    return newest is None or (checkpoint is not None and checkpoint > newest.step)
