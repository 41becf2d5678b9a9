"""The trainers in one process: evaluation, the end of a run, a state that goes on, and what observers see."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_core.base.digests import weights_digest
from ddp_core.checkpoint import Checkpointer, find_checkpoints, load
from ddp_core.checkpoint.state import Snapshots
from ddp_core.config.experiment import Evaluation
from ddp_core.config.layout import Layout
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.stop import Regroup, Stopped, StopRequest
from ddp_core.distributed.world import World
from ddp_core.live.collectives import LiveCollectives
from ddp_core.model.averaging import WeightAverage
from ddp_core.model.losses import class_hits, cross_entropy
from ddp_core.observe.callback import Callback
from ddp_core.observe.step import StepBatch, StepObserver, StepReport
from ddp_core.sampler import GlobalOrder
from ddp_core.trainers import Trainer
from ddp_core.trainers.evaluation import evaluate
from ddp_core.trainers.train_state import Position, TrainState
from tests.core.live.test_collectives import a_member
from tests.core.trainers.test_trainers import (
    CPU,
    batch_norm_and_dropout,
    experiment,
    finished,
    mlp,
    samples,
    trainer_of,
)
from tests.distributed.exact_cases import described
from tests.support.wording import refusing


@pytest.mark.parametrize("count", [1, 3, 5, 10, 101])
def test_evaluation_counts_every_sample_once(count: int) -> None:
    test, model = samples(count, seed=3), mlp()

    def forward(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert not model.training
        assert not torch.is_grad_enabled()
        outputs = model(inputs)
        return outputs, targets, cross_entropy(outputs, targets)

    def result(**settings: Any) -> dict[str, float]:
        collectives = Collectives(World(), CPU)
        return evaluate(model, forward, class_hits, test, Evaluation(**settings), collectives)

    found = result(samples_per_batch=4)
    assert model.training
    outputs = model(test.inputs)
    expected = functional.cross_entropy(outputs.double(), test.targets).item()
    assert found["test_loss"] == pytest.approx(expected, rel=1e-5)
    assert found["test_accuracy"] == (outputs.argmax(1) == test.targets).sum().item() / count
    assert result(samples_per_batch=4, where="rank0") == found


@pytest.mark.parametrize(
    ("settings", "forwards"),
    [({"samples_per_batch": 2}, 2), ({"samples_per_batch": 9}, 1), ({"samples_per_batch": 2, "where": "rank0"}, 5)],
    ids=["some ranks have fewer", "some ranks have none", "rank 0 has all"],
)
def test_ranks_that_keep_pace_run_as_many_batches_and_count_each_once(settings: dict[str, Any], forwards: int) -> None:
    test, model = samples(9, seed=3), mlp()
    calls: list[int] = []
    tables: list[Tensor] = []

    class Apart(Collectives):
        """Ranks of which each runs after the other, and sees its own part of a sum alone."""

        def sum_(self, tensor: Tensor) -> Tensor:
            tables.append(tensor.clone())
            return tensor

    def forward(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        calls[-1] += 1
        outputs = model(inputs)
        return outputs, targets, cross_entropy(outputs, targets)

    for world_size in (1, 3):
        for rank in range(world_size):
            calls.append(0)
            apart = Apart(World(rank=rank, world_size=world_size), CPU)
            evaluate(model, forward, class_hits, test, Evaluation(**settings), apart, keep_pace=True)
    assert calls[1:] == [forwards] * 3
    assert torch.equal(tables[0], torch.stack(tables[1:]).sum(0))


def test_an_epoch_ends_with_an_evaluation_and_a_mean_over_its_samples() -> None:
    trainer = finished(experiment(epochs=2), test=samples(30, seed=9))
    assert trainer.state.position.evaluation.keys() == {"test_loss", "test_accuracy"}
    assert trainer.state.position.best >= trainer.state.position.evaluation["test_accuracy"] > 0
    frozen = finished(experiment(epochs=1, optimizer={"lr": 1e-30}), train=samples(64))
    data = samples(64)
    expected = functional.cross_entropy(frozen.state.model(data.inputs), data.targets).item()
    assert frozen.state.position.last_epoch_loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("length", [{"epochs": 3}, {"epochs": 5, "max_steps": 6}], ids=["epochs", "max_steps"])
def test_what_a_run_ends_with_is_evaluated_whenever_that_is(length: dict[str, int]) -> None:
    """By `every_epochs` no epoch of these runs is due."""
    evaluation = Evaluation(every_epochs=4)
    trainer = finished(experiment(evaluation=evaluation, **length), test=samples(30, seed=9))
    assert trainer.state.position.evaluation == trainer.evaluator.evaluate()


class MakesRoom(LiveCollectives):
    """A rank that is to make room after its first step, and another one, which may have been asked to stop."""

    def __init__(self, is_other_asked: bool) -> None:
        super().__init__(World(), CPU, a_member(makes_room=True))
        self.is_other_asked = is_other_asked

    def gather(self, value: Any) -> list[Any]:
        return [value, self.is_other_asked] if isinstance(value, bool) else [value]


def test_a_rank_that_nobody_has_asked_stops_with_the_others_and_where_room_is_only_made_saves_nothing() -> None:
    for is_other_asked, end in ((True, Stopped), (False, Regroup)):
        with trainer_of(experiment(), collectives=MakesRoom(is_other_asked)) as trainer:
            with refusing(end):
                trainer.train()
            assert (trainer.state.step, trainer.saving.newest_step) == (1, int(is_other_asked))


def test_a_stop_that_is_asked_for_after_the_update_is_met_although_room_is_to_be_made() -> None:
    stop = StopRequest()
    with trainer_of(experiment(), collectives=MakesRoom(is_other_asked=False), stop=stop) as trainer:
        save = trainer.loop.observers.settle

        def ask_then_save(batch: StepBatch) -> None:
            stop.reason = "SIGTERM"
            save(batch)

        trainer.loop.observers.settle = ask_then_save  # type: ignore[method-assign]
        with pytest.raises(Stopped, match="SIGTERM"):
            trainer.train()
        assert trainer.state.step == trainer.saving.newest_step == 2


def _lived_in() -> TrainState:
    """A state of which every entry is another than in a fresh one."""
    state = _unlived_in()
    for _ in range(2):
        loss = state.model(samples(4).inputs).square().sum()
        state.scaler.scale(loss).backward()
        state.scaler.step(state.optimizer)
        state.scaler.update(3.0)
        state.schedule.step()
        state.average.update_parameters(state.model)
    for kept in state.optimizer.state.values():
        kept |= {"newest": deque([torch.rand(3), 2], maxlen=3), "by_decay": {0.9: [torch.rand(2), "a text"]}}
    state.callbacks[0].load_state_dict({"count": 7})
    for number, name in enumerate(POSITION, 1):
        setattr(state.position, name, {"loss": float(number)} if name == "evaluation" else number)
    return state


def _unlived_in() -> TrainState:
    torch.manual_seed(0)
    model = batch_norm_and_dropout()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    average = WeightAverage(model, 0.9)
    return TrainState(model, optimizer, torch.amp.GradScaler("cpu"), schedule, average, [Counts()])


class Counts(Callback):
    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


PARTS = ("model", "optimizer", "scaler", "schedule", "average")
NOT_SAVED = ("learning_rate", "ownership", "_newest_evaluation", "_mark")
POSITION = [each.name for each in dataclasses.fields(Position)]


def _entries(state: TrainState) -> dict[str, Any]:
    """Every field of the state by its name, in plain values or as a text."""
    parts = {part: described(getattr(state, part).state_dict()) for part in PARTS}
    callbacks = [each.state_dict() for each in state.callbacks]
    return {name: getattr(state.position, name) for name in POSITION} | parts | {"callbacks": callbacks}


def test_every_entry_of_the_state_comes_back(tmp_path: Path) -> None:
    """A new field of TrainState is one more entry here, unless NOT_SAVED names it."""
    fresh, lived = _unlived_in(), _lived_in()
    expected, before = _entries(lived), _entries(fresh)
    unchanged = [name for name, value in expected.items() if before[name] == value]
    assert unchanged == [], "nothing would be seen of their loss"
    names = {each.name for each in dataclasses.fields(TrainState)}
    assert names == {*PARTS, *NOT_SAVED, "callbacks", "position"}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(lived.state_dict(), step=lived.step, epoch=0)
    fresh.load_state_dict(load(find_checkpoints(tmp_path)[0]))
    assert _entries(fresh) == expected


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


class Recorder(StepObserver):
    """Keeps the arguments of each call, and the weights at that moment."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.weights: list[str] = []
        self.ids: list[list[int]] = []
        self.reports: list[StepReport] = []
        self.trainer: Trainer | None = None

    def before_step(self, batch: StepBatch) -> None:
        self.ids.append(np.concatenate(batch.ids).tolist())
        self._note("before_step", batch.step)

    def before_wait(self) -> None:
        self._note("before_wait", self.seen[-1][1])

    def gradients_done(self, batch: StepBatch, reports: Sequence[StepReport]) -> None:
        self.reports += reports
        self._note("gradients_done", batch.step)

    def skipped(self, batch: StepBatch) -> None:
        self._note("skipped", batch.step)

    def after_step(self, batch: StepBatch) -> None:
        assert self.trainer.state.step == batch.step + 1
        self._note("after_step", batch.step)

    def _note(self, moment: str, step: int) -> None:
        self.seen.append((moment, step))
        self.weights.append(weights_digest(self.trainer.state.model.state_dict()))


MOMENTS = ["before_step", "before_wait", "gradients_done", "after_step"]


@pytest.mark.parametrize("layout", [Layout(), Layout(kind="dp", nproc_per_node=2)], ids=lambda layout: layout.kind)
def test_observers_see_the_moments_of_every_step_in_order(layout: Layout) -> None:
    recorder = Recorder()
    with trainer_of(experiment(), layout=layout, observers=(recorder,)) as recorder.trainer:
        recorder.trainer.train()
    assert recorder.seen == [(moment, step) for step in range(4) for moment in MOMENTS]
    assert recorder.ids == [GlobalOrder(64, 0).ids(0, step * 16, step * 16 + 16).tolist() for step in range(4)]
    assert [(report.step, report.samples, len(report.losses)) for report in recorder.reports] == [
        (step, 16, 4) for step in range(4)
    ]
    changes = [before != after for before, after in pairwise(recorder.weights)]
    assert changes == [moment == "gradients_done" for moment, _ in recorder.seen][:-1]


class RaisesAtBadLosses(StepObserver):
    def losses_read(self, reports: Sequence[StepReport]) -> None:
        if not all(report.is_finite for report in reports):
            raise RuntimeError("the observer's own words")


def test_a_bad_loss_is_what_ends_the_run_where_an_observer_raises_at_it() -> None:
    data = samples(64)
    data.inputs[GlobalOrder(64, 0).ids(0, 32, 48)[13]] = math.nan
    with trainer_of(experiment(), train=data, observers=(RaisesAtBadLosses(),)) as trainer, refusing() as raised:
        trainer.train()
    assert "the observer's own words" in str(raised.value.__context__)


@pytest.mark.parametrize("layout", [Layout(), Layout(kind="dp", nproc_per_node=2)], ids=lambda layout: layout.kind)
@pytest.mark.parametrize("reduction", ["plain", "exact"])
def test_a_skipped_step_is_told_and_changes_neither_weights_nor_buffers(
    layout: Layout, reduction: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The forward of the bad batch has made NaN of the batch-norm statistics."""
    data, recorder = samples(64), Recorder()
    data.inputs[GlobalOrder(64, 0).ids(0, 32, 48)[13]] = math.nan
    record, details = experiment(reduction=reduction), {"train": data, "on_nan": "skip", "observers": (recorder,)}
    with trainer_of(record, batch_norm_and_dropout, layout, **details) as recorder.trainer:
        recorder.trainer.train()
    assert [moment for moment, step in recorder.seen if step == 2] == [*MOMENTS[:3], "skipped", "after_step"]
    assert ("skipped", 1) not in recorder.seen
    assert [report.is_finite for report in recorder.reports] == [True, True, False, True]
    assert "step skipped" in capsys.readouterr().out
    last = recorder.trainer.state.position.last_epoch_loss
    assert math.isfinite(last)
    before, after = (recorder.weights[recorder.seen.index((moment, 2))] for moment in ("before_step", "after_step"))
    assert after == before
    assert all(value.isfinite().all() for value in recorder.trainer.state.model.state_dict().values())


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
