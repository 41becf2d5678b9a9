"""What a rank holds when it leaves its group, and what the next trainer takes from it."""

from __future__ import annotations

from ddp_core.live.held import HeldState
from tests.core.trainers.test_trainers import experiment, trainer_of


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
