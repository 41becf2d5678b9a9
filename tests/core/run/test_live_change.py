"""What a membership of a live recovery has changed, as metrics and people are told it."""

from __future__ import annotations

import pytest

from ddp_core.run.live import Change


@pytest.mark.parametrize(
    ("before", "now", "lost", "joined", "words"),
    [
        (("0.0", "1.0", "2.0"), ("0.0", "2.0"), [1], [], "rank 1 lost after step 7; 2 ranks go on"),
        (("0.0", "1.0", "2.0"), ("2.0",), [0, 1], [], "ranks 0, 1 lost after step 7; 1 rank goes on"),
        (("0.0", "2.0"), ("0.0", "2.0", "1.1"), [], [2], "rank 2 joined after step 7; 3 ranks go on"),
        (("0.0", "1.0"), ("1.0", "0.1"), [0], [1], "rank 0 lost and rank 1 joined after step 7; 2 ranks go on"),
        (("0.0", "1.0"), ("0.0", "1.0"), [], [], "met again after step 7; 2 ranks go on"),
    ],
)
def test_lost_and_joined_ranks_follow_from_the_members(
    before: tuple[str, ...], now: tuple[str, ...], lost: list[int], joined: list[int], words: str
) -> None:
    change = Change.between(before, now)
    assert (change.lost, change.joined) == (lost, joined)
    assert change.in_words(7) == words
