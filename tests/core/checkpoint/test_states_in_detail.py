"""What a Checkpointer says and keeps, and what is made of a state before it is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ddp_core.checkpoint import Checkpointer, Superseded, best_checkpoint, find_checkpoints, load
from ddp_core.checkpoint.state import StateTensors
from tests.core.checkpoint.children import state_of

SAVED = r"checkpoint of step {}: \d+(\.\d+)? \w+ in (\d+\.\d{{3}}) s"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_is_told_and_may_be_the_best(tmp_path: Path, asynchronous: bool) -> None:
    lines: list[str] = []
    with Checkpointer(tmp_path, asynchronous=asynchronous, on_event=lines.append) as checkpointer:
        assert checkpointer.last is None
        for step, best in ((1, True), (2, False), (3, False)):
            checkpointer.save(state_of(step), step=step, epoch=0, best=best)
            checkpointer.before_update()
        checkpointer.close()
        assert len(find_checkpoints(tmp_path)) == 3  # two are kept, and the best one
        checkpointer.save(state_of(4), step=4, epoch=0)
    for step, line in enumerate(lines, start=1):
        found = re.fullmatch(
            SAVED.format(step) + (r", training stood still for (\d+\.\d{3}) s" if asynchronous else ""), line
        )
        assert found is not None, line
        assert all(float(seconds) < 60 for seconds in found.groups()[1:])
    best = best_checkpoint(tmp_path)
    assert best is not None
    assert best.step == 1
    assert len(find_checkpoints(tmp_path)) == 3


def test_a_save_that_is_given_up_is_told_with_its_step(tmp_path: Path) -> None:
    lines: list[str] = []
    answers = iter([True])
    with (
        pytest.raises(Superseded),
        Checkpointer(tmp_path, fence=lambda: next(answers, False), on_event=lines.append) as checkpointer,
    ):
        checkpointer.save(state_of(5), step=5, epoch=0)
    assert lines[0].startswith("warning: checkpoint of step 5 given up: this process may no longer write to")


def test_parameters_come_back_as_plain_tensors_and_views_on_their_own(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    state = {"weight": torch.nn.Parameter(torch.ones(2)), "view": whole[2:4], "grown": torch.ones(2).requires_grad_()}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state, step=1, epoch=0)
        assert checkpointer.last is not None
        found = load(checkpointer.last)
    assert [(type(each), each.requires_grad) for each in found.values()] == [(torch.Tensor, False)] * 3
    assert found["view"].tolist() == [2, 3]
    own = StateTensors(state)
    assert [type(each) for each in own.tensors] == [torch.Tensor] * 3
    assert StateTensors({"a": whole}).tensors[0] is whole
