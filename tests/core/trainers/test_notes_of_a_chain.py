"""What the ranks of a live recovery together know of steps that the chain's file may not have yet."""

from __future__ import annotations

import torch

from ddp_core.observe.step import StepReport
from ddp_core.trainers.step_chain import Noted, merged


def noted(step: int, parts: list[int], own: list[int], *, has_losses: bool = True) -> Noted:
    report = StepReport(step, 4, [1.0, 2.0]) if has_losses else None
    return Noted(step, 0, [0.1], parts, torch.tensor(own), report)


def test_each_step_has_what_any_rank_knows() -> None:
    first = [noted(4, [0], [10, 0, 0, 7]), noted(5, [0], [20, 0, 0, 8], has_losses=False)]
    other = [noted(3, [0, 1, 2], [1, 2, 3, 6]), noted(4, [2], [0, 0, 12, 7]), noted(5, [2], [0, 0, 22, 8])]
    found = merged([first, (), other], steps=6)
    assert [each.step for each in found] == [3, 4, 5]
    assert [each.own.tolist() for each in found] == [[1, 2, 3, 6], [10, 0, 12, 7], [20, 0, 22, 8]]
    assert [sorted(each.parts) for each in found] == [[0, 1, 2], [0, 2], [0, 2]]
    assert all(each.report is not None for each in found)
    assert first[0].own.tolist() == [10, 0, 0, 7], "the notes themselves stay as they are"


def test_a_step_whose_state_is_lost_is_left_out() -> None:
    assert [each.step for each in merged([[noted(4, [0], [1, 2]), noted(5, [0], [1, 2])]], steps=5)] == [4]
