"""What the launcher decides when workers have failed: every case, without starting a process.

Tests launch/agent.py, too.
"""

from __future__ import annotations

import signal

import pytest

from ddp_core.base.errors import ExitCode
from ddp_core.launch import agent as deciding

KILLED = -signal.SIGKILL
LOST, STOPPED = ExitCode.PEERS_LOST, ExitCode.STOPPED
TWO_LEFT = "starting the workers again from the last checkpoint (2 more restarts allowed)"
NONE_LEFT = "starting the workers again from the last checkpoint (0 more restarts allowed)"
REASON = "rank 1 (node 0) lost a peer: closed; continue with --resume auto"

CASES: dict[str, tuple[tuple[set[int], str | None, bool, int], tuple[int, list[str]]]] = {
    "a loss that was named": (({KILLED, LOST}, None, False, 3), (3, [TWO_LEFT])),
    "a loss that a report explains": (
        ({LOST}, REASON, False, 3),
        (3, ["rank 1 (node 0) lost a peer: closed", TWO_LEFT]),
    ),
    "the last restart": (({KILLED}, None, False, 1), (1, [NONE_LEFT])),
    "no restarts left": (({KILLED, LOST}, REASON, False, 0), (0, [])),
    "a death without a word": (({1}, None, False, 3), (3, [TWO_LEFT])),
    "a mistake": (({ExitCode.BAD_INPUT, LOST}, REASON, False, 3), (0, [])),
    "a request to stop": (({STOPPED}, REASON, False, 3), (0, [])),
    "a request by a launcher with a node to take in": (
        ({STOPPED}, REASON, True, 3),
        (4, [deciding.MAKING_ROOM]),
    ),
    "the same without restarts, which it does not cost": (
        ({STOPPED}, REASON, True, 0),
        (1, [deciding.MAKING_ROOM]),
    ),
    "the same while a worker was killed": (
        ({STOPPED, KILLED}, None, True, 3),
        (4, [deciding.MAKING_ROOM]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_follows_a_failure(case: str) -> None:
    (codes, reason, room, restarts_left), decision = CASES[case]
    assert deciding.after_failure(codes, reason, room, restarts_left) == decision


# Bad input, no checkpoint, a missing resource, NaN, a fault of ours, a request to stop.
FINAL_CODES = (2, 3, 4, 5, 70, 75)


@pytest.mark.parametrize("code", FINAL_CODES)
def test_nothing_is_tried_again_that_would_come_to_the_same_end(code: int) -> None:
    assert deciding.after_failure({code, KILLED}, None, room=False, restarts_left=3) == (0, [])
    assert deciding.patience([code, KILLED]) == deciding.FINISHING_SECONDS


@pytest.mark.parametrize(
    ("codes", "world_is_local", "asked"),
    [({STOPPED}, False, True), ({STOPPED, KILLED}, False, True), ({STOPPED}, True, False), ({LOST}, False, False)],
)
def test_who_waits_matters_where_another_launcher_may_have_asked(
    codes: set[int], world_is_local: bool, asked: bool
) -> None:
    assert deciding.may_make_room(codes, world_is_local) is asked


def test_what_follows_when_room_was_made() -> None:
    assert not any(map(deciding.would_repeat, (STOPPED, LOST)))
    assert all(map(deciding.would_repeat, FINAL_CODES[:-1]))


def test_workers_that_cannot_speak_are_spoken_for_in_the_order_of_their_ranks() -> None:
    assert deciding.losses({3: KILLED, 1: 6}, stopped=[2], node="node 1") == [
        "rank 2 (node 1) is stopped; it is killed now",
        "rank 3 (node 1) was killed (SIGKILL)",
    ]
    assert deciding.losses({1: 6, 0: 2}, stopped=[], node="node 0") == []


@pytest.mark.parametrize(
    ("codes", "seconds"), [([KILLED], 8), ([LOST, 1], 8), ([KILLED, STOPPED], deciding.FINISHING_SECONDS)]
)
def test_who_was_asked_to_stop_gets_time_to_save(codes: list[int], seconds: int) -> None:
    assert deciding.patience(codes) == seconds
