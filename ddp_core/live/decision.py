"""Whether others may go on without workers that have ended, and what the user is told of it."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping

from ddp_core.base.errors import ExitCode
from ddp_core.launch.agent import FINAL

STARTING_ALL_AGAIN = "no group of ranks can go on; the workers of all nodes start again from the newest checkpoint"
WITHOUT_STORE = (
    "the rendezvous does not answer; the ranks train on without it. Until it is back nobody can join, and after a loss "
    "all go back to the newest checkpoint"
)
STORE_IS_BACK = "the rendezvous is back: others can join, and a lost rank lets the others go on"


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
