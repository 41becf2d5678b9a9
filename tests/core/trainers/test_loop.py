"""The loop in one process: its steps as in the textbook, its moments in order, and how it is asked to stop.

Tests trainers/strategy.py, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ddp_core.config.experiment import Experiment, Optimizer, Schedule
from ddp_core.config.layout import Layout
from ddp_core.data.splits import InMemory
from ddp_core.distributed.stop import Regroup, Stopped, StopRequest
from ddp_core.distributed.world import World
from ddp_core.live.collectives import LiveCollectives
from ddp_core.model.optimizers import build_optimizer
from ddp_core.observe.step import StepBatch
from ddp_core.sampler import GlobalOrder
from tests.core.live.test_collectives import a_member
from tests.core.trainers import builders
from tests.support.wording import refusing


def textbook(record: Experiment, data: InMemory, build: Callable[[], nn.Module] = builders.mlp) -> nn.Module:
    """Train with the loop of every tutorial: per batch one mean loss, one backward, one step, tensor by tensor."""
    torch.manual_seed(record.seed)
    model = build()
    assert isinstance(record.optimizer, Optimizer)
    assert isinstance(record.schedule, Schedule)
    optimizer = build_optimizer(record.optimizer.model_copy(update={"implementation": "loop"}), model)
    order, size = GlobalOrder(len(data), record.seed), record.global_batch_size
    steps = math.ceil(len(data) / size) if record.last_batch == "keep" else len(data) // size
    for epoch in range(record.epochs):
        for step in range(steps):
            inputs, targets = data.__getitems__(order.ids(epoch, step * size, min(len(data), (step + 1) * size)))
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            if record.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), record.clip_norm)
            for group in optimizer.param_groups:
                base = record.optimizer.base_rate(size)
                group["lr"] = record.schedule.rate(base, epoch * steps + step, steps, record.total_steps(steps))
            optimizer.step()
    return model


def assert_close(ours: nn.Module, theirs: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, mine), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.allclose(mine, other, rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize(
    ("micro_batch", "reduction"), [(None, "plain"), (8, "plain"), (3, "plain"), (8, "exact"), (3, "exact")]
)
@pytest.mark.parametrize("recipe", builders.RECIPES)
def test_training_is_the_textbooks(recipe: str, micro_batch: int | None, reduction: str) -> None:
    fields: dict[str, Any] = {
        "global_batch_size": 24 if micro_batch == 3 else 16,
        "epochs": 3,
        **builders.RECIPES[recipe],
    }
    record = builders.experiment(micro_batch=micro_batch, reduction=reduction, **fields)
    assert_close(builders.finished(record).state.model, textbook(record, builders.samples(64)))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns_and_has_one_digest(precision: str) -> None:
    fields: dict[str, Any] = {"epochs": 3, "reduction": "exact", **builders.RECIPES["sgd"]}
    alone, full = (
        builders.finished(builders.experiment(precision=precision, **fields)),
        builders.finished(builders.experiment(**fields)),
    )
    together = builders.finished(
        builders.experiment(precision=precision, **fields), layout=Layout(kind="dp", nproc_per_node=3)
    )
    assert builders.digests(together) == builders.digests(alone)
    assert builders.digests(full) != builders.digests(alone), "autocast was not on"
    assert_close(alone.state.model, full.state.model, tolerance=0.05)
    assert (together.state.scaler is not None) == (precision == "fp16")
    assert all(value.dtype == torch.float32 for value in together.state.model.state_dict().values())


class MakesRoom(LiveCollectives):
    """A rank that is to make room after its first step, and another one, which may have been asked to stop."""

    def __init__(self, is_other_asked: bool) -> None:
        super().__init__(World(), builders.CPU, a_member(makes_room=True))
        self.is_other_asked = is_other_asked

    def gather(self, value: Any) -> list[Any]:
        return [value, self.is_other_asked] if isinstance(value, bool) else [value]


def test_a_rank_that_nobody_has_asked_stops_with_the_others_and_where_room_is_only_made_saves_nothing() -> None:
    for is_other_asked, end in ((True, Stopped), (False, Regroup)):
        with builders.trainer_of(builders.experiment(), collectives=MakesRoom(is_other_asked)) as trainer:
            with refusing(end):
                trainer.train()
            assert (trainer.state.step, trainer.saving.newest_step) == (1, int(is_other_asked))


def test_a_stop_that_is_asked_for_after_the_update_is_met_although_room_is_to_be_made() -> None:
    stop = StopRequest()
    with builders.trainer_of(builders.experiment(), collectives=MakesRoom(is_other_asked=False), stop=stop) as trainer:
        save = trainer.loop.observers.settle

        def ask_then_save(batch: StepBatch) -> None:
            stop.reason = "SIGTERM"
            save(batch)

        trainer.loop.observers.settle = ask_then_save  # type: ignore[method-assign]
        with pytest.raises(Stopped, match="SIGTERM"):
            trainer.train()
        assert trainer.state.step == trainer.saving.newest_step == 2


@pytest.mark.parametrize("layout", [Layout(), Layout(kind="dp", nproc_per_node=2)], ids=lambda layout: layout.kind)
def test_observers_see_the_moments_of_every_step_in_order(layout: Layout) -> None:
    recorder = builders.Recorder()
    with builders.trainer_of(builders.experiment(), layout=layout, observers=(recorder,)) as recorder.trainer:
        recorder.trainer.train()
    assert recorder.seen == [(moment, step) for step in range(4) for moment in builders.MOMENTS]
    assert recorder.ids == [GlobalOrder(64, 0).ids(0, step * 16, step * 16 + 16).tolist() for step in range(4)]
    assert [(report.step, report.samples, len(report.losses)) for report in recorder.reports] == [
        (step, 16, 4) for step in range(4)
    ]
    changes = [before != after for before, after in pairwise(recorder.weights)]
    assert changes == [moment == "gradients_done" for moment, _ in recorder.seen][:-1]
