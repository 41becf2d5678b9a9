"""What a rank holds when it leaves its group, and what the next trainer takes from it."""

from __future__ import annotations

from dataclasses import replace

from ddp_core.live.held import HeldState
from tests.core.trainers.builders import experiment, trainer_of


def test_what_the_guard_has_found_outlives_a_group() -> None:
    with trainer_of(experiment()) as trainer:
        trainer.train()
        trainer.guard.is_broken = True
        trainer.guard.figures["seconds"] = {"same state": 1.5}
        trainer.witnessed.noted_after = 3
        held = HeldState.of(trainer)
    with trainer_of(experiment()) as following:
        held.give_to(following)
        assert following.state.step == held.at.step
        assert following.guard.is_broken
        assert following.guard.figures["seconds"] == {"same state": 1.5}
        assert following.witnessed.noted_after == 3, "a fork's first checkpoint knows nothing of its settings"


def test_all_ranks_go_on_with_what_one_of_them_has_found() -> None:
    with trainer_of(experiment()) as trainer:
        trainer.train()
        unaware = HeldState.of(trainer)
    aware = replace(unaware.offer, is_broken=True, noted_after=3)
    following = unaware.at_position(aware, 0, [unaware.offer, aware])
    assert (following.is_broken, following.noted_after) == (True, 3)
