"""What a save holds, and what it cannot."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddp_core.base.digests import weights_digest
from ddp_core.checkpoint import Checkpointer, find_checkpoints, load
from ddp_core.checkpoint.state import Snapshots
from tests.core.trainers.builders import MOMENTS, Recorder, experiment, mlp, trainer_of
from tests.support.wording import refusing


@pytest.mark.parametrize(("first", "tried"), [(1, 0), (3, 4)])
def test_an_optimizer_whose_state_no_checkpoint_can_hold_is_refused(first: int, tried: int, tmp_path: Path) -> None:
    """After the first update; where it comes later, by the save, which is due at the end."""

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if trainer.state.step + 1 >= first:
            for kept in optimizer.state.values():
                kept["newest"] = range(3)

    record = experiment(optimizer={"lr": 0.1, "momentum": 0.9})
    with Checkpointer(tmp_path) as checkpointer, trainer_of(record, checkpointer=checkpointer) as trainer:
        trainer.state.optimizer.register_step_post_hook(keep)
        with refusing():
            trainer.train()
        assert trainer.state.step == tried
    assert find_checkpoints(tmp_path) == []


class Clamped(nn.Module):
    """A model whose forward writes to a weight, from some micro-batch on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.inner, self.first, self.forwards = mlp(), first, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards > self.first:
            with torch.no_grad():
                next(self.inner.parameters()).clamp_(-0.02, 0.02)
        outputs: Tensor = self.inner(inputs)
        return outputs


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_checkpoint_holds_no_write_of_the_next_forward(
    first: int, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    carry_on = Snapshots.carry_on

    def late(snapshots: Snapshots) -> None:
        """The writing thread comes late, as on a busy machine, so that the forward is first."""
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.05)
        carry_on(snapshots)

    monkeypatch.setattr(Snapshots, "carry_on", late)
    recorder = Recorder()
    with (
        Checkpointer(tmp_path, asynchronous=asynchronous, keep_last=9) as checkpointer,
        trainer_of(
            experiment(epochs=1, optimizer={"name": "sgd", "lr": 0.5}, reduction="exact"),
            lambda: Clamped(first),
            observers=[recorder],
            checkpoint_every=1,
            guard="off",
            checkpointer=checkpointer,
        ) as recorder.trainer,
    ):
        recorder.trainer.train()
        assert not recorder.trainer.saving.is_due_now, "the last step has its checkpoint"
    found = {each.step: weights_digest(load(each)["model"]) for each in find_checkpoints(tmp_path)}
    after = {
        at + 1: sha for (moment, at), sha in zip(recorder.seen, recorder.weights, strict=True) if moment == MOMENTS[-1]
    }
    wrong = [step for step, digest in after.items() if found[step] != digest]
    assert len(found) == 4
    # Of a first write nobody knew before, so the checkpoint that it may be in is named.
    is_late = asynchronous and first > 0
    assert wrong == ([1] if is_late else [])
    assert ("the checkpoint of step 1, which was copied meanwhile" in capsys.readouterr().out) == is_late
