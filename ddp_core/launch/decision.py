"""What a node's launcher does when its workers have failed: start them again, make room for a node, or end.

The functions here decide it and put it into words; `agent` finds out what has happened, and does what they say.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping

from ddp_core.base.errors import ExitCode

FINISHING_SECONDS = 25
"""How long workers that were asked to stop may take to finish their step and save it."""
_LEAVING_SECONDS = 8
"""How long workers may take to end after a loss: they have nothing to finish."""
MAKING_ROOM = "another node has come; the workers save and start again with it"
FINAL = frozenset(ExitCode) - {ExitCode.DONE, ExitCode.PEERS_LOST}
"""The exit codes of workers to which a new start would only bring the same end."""


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
