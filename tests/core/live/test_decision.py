"""Whether others may go on without workers that have ended, and what the user is told."""

from __future__ import annotations

import signal

import pytest

from ddp_core.base.errors import ExitCode
from ddp_core.live.agent import going_on, may_go_on

KILLED = -signal.SIGKILL
LOST, STOPPED = ExitCode.PEERS_LOST, ExitCode.STOPPED


@pytest.mark.parametrize(
    ("codes", "restarts_left", "may"),
    [
        ([KILLED], 1, True),
        ([1], 1, True),
        ([KILLED, KILLED], 1, False),
        ([KILLED], 0, False),
        ([], 3, False),
        ([KILLED, ExitCode.DONE], 3, False),
        ([KILLED, LOST], 3, False),
        ([KILLED, ExitCode.NUMERICS], 3, False),
        ([STOPPED], 3, False),
        ([-signal.SIGTERM], 3, False),
    ],
)
def test_whether_the_others_may_go_on(codes: list[int], restarts_left: int, may: bool) -> None:
    assert may_go_on(codes, [signal.SIGTERM], restarts_left) is may


def test_the_user_is_told_without_whom_the_others_go_on() -> None:
    killed, left = going_on({0: KILLED, 2: 1}, {0: 1, 2: None}, "node 0", 2)
    assert (
        killed == "rank 1 (node 0) was killed (SIGKILL); the others go on, and a new worker joins them (2 more allowed)"
    )
    assert left.startswith("a new worker (node 0) ended with exit code 1; the others go on")
