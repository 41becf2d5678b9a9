"""Tiny experiments, models and data, and trainers of them in one process, without files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ddp_core.base.digests import optimizer_digest, weights_digest
from ddp_core.checkpoint import Checkpointer
from ddp_core.config.experiment import Component, Experiment, Optimizer
from ddp_core.config.layout import Layout
from ddp_core.config.options import Options
from ddp_core.data.splits import InMemory, Splits
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.stop import StopRequest
from ddp_core.distributed.world import World
from ddp_core.experiment.building import BuiltExperiment
from ddp_core.model.losses import class_hits, cross_entropy
from ddp_core.model.optimizers import build_optimizer
from ddp_core.observe.callback import Callback
from ddp_core.observe.faults import FaultScript
from ddp_core.observe.metrics import Console, MetricsWriter
from ddp_core.observe.step import StepBatch, StepObserver, StepReport
from ddp_core.trainers import Job, RunAccess, Trainer, Trial, build_trainer

CPU = torch.device("cpu")
FEATURES, CLASSES = 12, 5


def samples(count: int, seed: int = 0) -> InMemory:
    generator = torch.Generator().manual_seed(seed)
    return InMemory(
        torch.randn(count, FEATURES, generator=generator), torch.randint(0, CLASSES, (count,), generator=generator)
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def batch_norm_and_dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, CLASSES), nn.Dropout(0.1)
    )


def experiment(**fields: Any) -> Experiment:
    parts = {"model": Component(name="here"), "data": Component(name="here"), "global_batch_size": 16, "micro_batch": 4}
    return Experiment.model_validate({"name": "mine", "reduction": "plain"} | parts | fields)


@contextlib.contextmanager
def trainer_of(
    record: Experiment,
    build: Callable[[], nn.Module] = mlp,
    layout: Layout | None = None,
    *,
    train: InMemory | None = None,
    test: InMemory | None = None,
    faults: tuple[str, ...] = (),
    stop: StopRequest | None = None,
    observers: Sequence[StepObserver] = (),
    callbacks: Sequence[Callback] = (),
    device: torch.device = CPU,
    collectives: Collectives | None = None,
    only_steps: int | None = None,
    checkpointer: Checkpointer | None = None,
    **options: Any,
) -> Iterator[Trainer]:
    torch.manual_seed(record.seed)
    model, on = build(), collectives or Collectives(World(), device)
    assert isinstance(record.optimizer, Optimizer)
    job = Job(
        experiment=record,
        layout=layout or Layout(device="cuda" if device.type == "cuda" else "cpu"),
        options=Options(reduction=record.reduction, **options),
        parts=BuiltExperiment(
            model=model,
            loss=cross_entropy,
            hits=class_hits,
            splits=Splits(samples(64) if train is None else train, test, CLASSES, None, ""),
            optimizer=build_optimizer(record.optimizer, model.to(on.device), record.global_batch_size),
            callbacks=callbacks,
        ),
        collectives=on,
        console=Console(),
        metrics=MetricsWriter(None),
        stop=stop or StopRequest(),
        observers=[FaultScript(faults), *observers],
        run=RunAccess(directory=Path("run"), checkpointer=checkpointer),
        trial=Trial(only_steps=only_steps),
    )
    trainer = build_trainer(job)
    try:
        yield trainer
    finally:
        trainer.close()


def finished(
    record: Experiment, build: Callable[[], nn.Module] = mlp, layout: Layout | None = None, **details: Any
) -> Trainer:
    with trainer_of(record, build, layout, **details) as trainer:
        trainer.train()
    return trainer


def digests(trainer: Trainer) -> tuple[str, str]:
    return weights_digest(trainer.state.model.state_dict()), optimizer_digest(trainer.state.optimizer.state_dict())


RECIPES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}},
    "adamw": {"optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)}},
    "adam, one loop": {"optimizer": {"name": "adam", "lr": 0.01, "implementation": "loop"}},
    "sgd, foreach": {"optimizer": {"lr": 0.1, "momentum": 0.9, "implementation": "foreach"}},
    "clipped": {"optimizer": {"lr": 0.5}, "clip_norm": 0.05},
    "cosine": {"optimizer": {"lr": 0.5}, "schedule": {"name": "cosine", "warmup_steps": 3}},
    "linear scaling": {"optimizer": {"lr": 0.1, "reference_batch": 8}},
    "ragged end": {"last_batch": "keep", "global_batch_size": 24},
}


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
