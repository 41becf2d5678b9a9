"""What a node's launcher does when its workers have failed: start them again, make room for a node, or end.

Here it is decided and put into words. The agent looks what has happened, asks here, says it and does it.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from ddp_core.base.errors import ExitCode

FINISHING_SECONDS = 25
"""What workers get that were asked to stop: they finish the step and save it."""
_LEAVING_SECONDS = 8
"""What workers get after a loss: nothing is left to finish."""
MAKING_ROOM = "another node has come; the workers save and start again with it"
FINAL = frozenset(ExitCode) - {ExitCode.DONE, ExitCode.PEERS_LOST}
"""A new start would only come to the same end."""


class Next(Enum):
    """What follows the end of a node's workers."""

    RESTART = auto()
    """A new start from the last checkpoint, which is counted."""
    MAKE_ROOM = auto()
    """A new start together with the node that waits, which is not counted."""
    END = auto()
    """The end of the launch."""


@dataclass(frozen=True)
class Decision:
    """What follows, and what the user is told."""

    next: Next
    words: tuple[str, ...] = ()


def losses(codes: Mapping[int, int], stopped: Collection[int], node: str) -> list[str]:
    """What to say of workers that cannot speak for themselves.

    `codes`: exit codes by rank, minus the signal's number for a killed worker. `stopped`: the ranks that are stopped
    (SIGSTOP). `node`: where they run, such as "node 0".
    """
    lost = {rank: f"was killed ({signal.Signals(-code).name})" for rank, code in codes.items() if code < 0}
    lost |= dict.fromkeys(stopped, "is stopped; it is killed now")
    return [f"rank {rank} ({node}) {what}" for rank, what in sorted(lost.items())]


def patience(codes: Collection[int]) -> int:
    """Seconds that the other workers get to leave, by the exit codes of those that have failed."""
    return FINISHING_SECONDS if FINAL.intersection(codes) else _LEAVING_SECONDS


def may_make_room(codes: Collection[int], world_is_local: bool) -> bool:
    """Whether it matters that a node waits: workers that save and leave may have been asked by another node's launcher.

    `world_is_local`: this node's workers are all there are, so no other launcher could have been quicker.
    """
    return ExitCode.STOPPED in codes and not world_is_local


def after_failure(codes: Collection[int], reason: str | None, room: bool, restarts_left: int) -> Decision:
    """What follows when workers of this node have failed, and the others were ended.

    `codes`: exit codes, also those in the reports: a worker that has said why it leaves may be killed before it is
    gone. `reason`: the most telling report's message, None where the user knows already. `room`: `may_make_room`, and
    a node does wait.
    """
    if room:
        # Its workers and ours have saved, to start again with the node that waits.
        return Decision(Next.MAKE_ROOM, (MAKING_ROOM,))
    if restarts_left == 0 or FINAL.intersection(codes):
        return Decision(Next.END)
    said = [] if reason is None else [reason.removesuffix("; continue with --resume auto")]
    left = restarts_left - 1
    said.append(f"starting the workers again from the last checkpoint ({left} more restarts allowed)")
    return Decision(Next.RESTART, tuple(said))


def after_making_room(code: int | None) -> Next:
    """What follows when healthy workers were ended because a node waits.

    `code`: the exit code in the most telling report. A worker may have failed meanwhile over something that a new start
    would repeat: the waiting node may be a peer that lost a worker of ours, and noticed before this launcher did.
    """
    return Next.END if code in FINAL - {ExitCode.STOPPED} else Next.MAKE_ROOM
