"""What a membership of a live recovery has changed, as metrics and people are told it."""

from __future__ import annotations

import pytest

from ddp_core.live.recovery import Change

A, B, C, AGAIN, NEW = "0.0@0", "1.0@0", "0.0@1", "0.1@0", "1.1@0"


@pytest.mark.parametrize(
    ("before", "now", "leaving", "ranks", "words"),
    [
        ((A, B, C), (A, C), (1,), ([1], [], []), "rank 1 lost after step 7; 2 ranks go on"),
        ((A, B, C), (C,), (), ([0, 1], [], []), "ranks 0, 1 lost after step 7; 1 rank goes on"),
        ((A, B, C), (C,), (0,), ([], [0, 1], []), "ranks 0, 1 left after step 7; 1 rank goes on"),
        ((A, C), (A, C, NEW), (), ([], [], [2]), "rank 2 joined after step 7; 3 ranks go on"),
        ((A, B), (B, AGAIN), (), ([0], [], [1]), "rank 0 lost and rank 1 joined after step 7; 2 ranks go on"),
        ((A, B), (A, B), (), ([], [], []), "met again after step 7; 2 ranks go on"),
    ],
)
def test_who_has_gone_and_come_follows_from_the_members(
    before: tuple[str, ...], now: tuple[str, ...], leaving: tuple[int, ...], ranks: tuple[list[int], ...], words: str
) -> None:
    change = Change.between(before, now, leaving)
    assert (change.lost, change.left, change.joined) == ranks
    assert change.in_words(7) == words
