"""Who trains together after a loss, as a protocol of pure functions: no clock, no store, no process.

A membership is a number and the names of the processes that train together, in the order of their ranks. A store has
the newest one, and a launcher replaces it by one compare-and-set. What launchers and ranks then do follows from the
functions here; tests/core/distributed/test_membership.py runs them through every sequence of losses and arrivals of a
small launch. docs/explanation/live-recovery.md describes the protocol.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import NamedTuple


class Regroup(Exception):
    """This process has left its group, with the state that it held then, to meet the others in another one."""


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


class Held(NamedTuple):
    """How far the state is that a process holds; the greater one is the newer one."""

    step: int
    """Finished steps."""
    is_settled: bool
    """Whether what follows the update of that step is done, too: an evaluation, a digest, a save. Rank 0 alone knows
    it, since it alone writes; another rank does these again, if rank 0 is lost before the next step."""


def next_membership(
    now: Membership, ended: Collection[str], left: Collection[str], waiting: Collection[str]
) -> Membership | None:
    """The membership that follows, decided by a launcher; None where nothing is to be changed, or nobody is left.

    `ended`: processes that are known to have ended. `left`: members that have left the group of `now`, because an
    exchange failed or to make room. `waiting`: new processes that are ready to be taken in.

    A process that has ended is left out at once. Where nobody has ended, all members must have left first: one that
    still trains is not interrupted, and one that is silent is not taken for dead.
    """
    alive = tuple(name for name in now.members if name not in ended)
    if not alive:
        return None
    if len(alive) < len(now.members) or all(name in left for name in alive):
        new = (name for name in sorted(waiting) if name not in ended and name not in now.members)
        return Membership(now.number + 1, (*alive, *new))
    return None


def must_leave(mine: int, now: Membership) -> bool:
    """Whether a process must give up the membership of number `mine`, because a newer one counts now."""
    return now.number > mine


def newest_holder(held: Sequence[Held | None]) -> int | None:
    """The rank whose state all take: the newest one, of several the lowest rank's; None where no rank holds any.

    `held`: what each rank holds, by rank.
    """
    known = [(each, -rank) for rank, each in enumerate(held) if each is not None]
    return -max(known)[1] if known else None


def goes_back_to_checkpoint(newest: Held | None, checkpoint: int | None) -> bool:
    """Whether the checkpoint of this step (None: there is none) is newer than any state that a process holds.

    A rank may save a step and die, when no other rank has finished that step yet.
    """
    return newest is None or (checkpoint is not None and checkpoint > newest.step)
