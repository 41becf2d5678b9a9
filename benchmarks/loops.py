"""One training step in several implementations: the bare loop, this project's trainer, and three peers.

Each builder returns a turn: a function that trains `steps + 1` steps on the same model, data and optimizer settings,
and returns the seconds per step over all but the first. The bare loop is that of source 003 (forward, loss, zero_grad,
backward, step, `loss.item()`, counts); `Tuning` says what a user of torch can make quicker about it.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.turns import Seconds, Turn
from ddp_core.base.determinism import choose_kernels
from ddp_core.base.process import keep_freed_memory
from ddp_core.base.torchvision_import import import_torchvision
from ddp_core.checkpoint import Checkpointer
from ddp_core.config.experiment import Component, Experiment, Optimizer
from ddp_core.config.layout import Layout
from ddp_core.config.options import Options
from ddp_core.data.splits import InMemory, Splits
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.stop import StopRequest
from ddp_core.distributed.world import World
from ddp_core.experiment.building import BuiltExperiment
from ddp_core.model.builders import MODELS
from ddp_core.model.losses import class_hits, cross_entropy
from ddp_core.model.optimizers import build_optimizer
from ddp_core.observe.heartbeat import Heartbeat
from ddp_core.observe.metrics import Console, MetricsWriter
from ddp_core.observe.step import StepBatch, StepObserver
from ddp_core.trainers import Job, RunAccess, build_trainer

CLASSES = 10
SETTINGS: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": True}


@dataclass(frozen=True)
class Tuning:
    """What a bare loop does beyond source 003: options that torch has, or a few lines of one's own.

    It keeps the memory that it frees (`keep_freed_memory`, as this project's runs do), updates with the optimizer's
    fused kernel, and draws its batches from a `TensorDataset` by one `index_select` in place of a `DataLoader`.
    """

    keep_memory: bool = False
    fused: bool = False
    index_select: bool = False


@dataclass(frozen=True)
class Case:
    """What is trained: model, shape of a sample, samples per step, cut into micro-batches (None: not), timed steps.

    With `data_loader` the loops that bring no data of their own draw from a shuffling `DataLoader` over a
    `TensorDataset` (or by `Shuffled`); without, they use one batch in memory again and again.
    """

    title: str
    model: str
    shape: tuple[int, ...]
    global_batch_size: int
    steps: int
    data_loader: bool
    micro_batch: int | None = None
    target: float | None = None

    def build_model(self) -> nn.Module:
        """The model in training mode, the same weights for every contender."""
        torch.manual_seed(0)
        return MODELS[self.model]().train()

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets: a sample for each place in `steps + 1` batches, or one batch that is used again."""
        generator = torch.Generator().manual_seed(0)
        samples = self.global_batch_size * ((self.steps + 1) if self.data_loader else 1)
        inputs = torch.randn(samples, *self.shape, generator=generator)
        return inputs, torch.randint(0, CLASSES, (samples,), generator=generator)

    def batches(self, index_select: bool = False) -> Iterable[tuple[Tensor, Tensor]]:
        """What an ordinary loop iterates over."""
        inputs, targets = self.tensors()
        if self.data_loader and index_select:
            return Shuffled(inputs, targets, self.global_batch_size)
        if self.data_loader:
            dataset = TensorDataset(inputs, targets)
            return DataLoader(dataset, batch_size=self.global_batch_size, shuffle=True)
        return Again(inputs, targets, self.steps + 1)


class Again:
    """One batch, `times` times. (Lightning takes a list for a collection of loaders.)"""

    def __init__(self, inputs: Tensor, targets: Tensor, times: int) -> None:
        self.batch, self.times = (inputs, targets), times

    def __len__(self) -> int:
        return self.times

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return repeat(self.batch, self.times)


class Shuffled:
    """The batches of a shuffling `DataLoader` over tensors, each taken by one `index_select`."""

    def __init__(self, inputs: Tensor, targets: Tensor, size: int) -> None:
        self.inputs, self.targets, self.size = inputs, targets, size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for ids in torch.randperm(len(self.inputs)).split(self.size):
            yield self.inputs.index_select(0, ids), self.targets.index_select(0, ids)


class Clock(StepObserver):
    """Seconds per step, on the wall's clock and of this process, from the end of the first step to that of the last.

    A trainer takes it as an observer of its steps; other loops call `tick`.
    """

    def __init__(self, steps: int) -> None:
        self.steps, self.done, self.first, self.last = steps, 0, (0.0, 0.0), (0.0, 0.0)

    def after_step(self, batch: StepBatch) -> None:
        self.tick()

    def tick(self) -> None:
        """To be called at the end of every step."""
        self.done += 1
        if self.done == 1:
            self.first = time.perf_counter(), time.process_time()
        elif self.done == self.steps + 1:
            self.last = time.perf_counter(), time.process_time()

    def seconds(self) -> Seconds:
        """The result; every step must have been counted."""
        assert self.done == self.steps + 1, self.done
        step, cpu = ((last - first) / self.steps for last, first in zip(self.last, self.first, strict=True))
        return {"step": step, "cpu": cpu}


def _parts(model: nn.Module, fused: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    return nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), fused=fused or None, **SETTINGS)


def bare(case: Case, tuning: Tuning) -> Turn:
    """The loop of source 003."""
    if tuning.keep_memory:
        keep_freed_memory()
    model = case.build_model()
    criterion, optimizer = _parts(model, tuning.fused)
    batches = case.batches(tuning.index_select)

    def turn() -> Seconds:
        clock = Clock(case.steps)
        train_loss, correct, total = 0.0, 0.0, 0
        for inputs, targets in batches:
            outputs = model(inputs)
            loss = criterion(outputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            train_loss += loss.item()
            total += targets.size(0)
            correct += torch.eq(outputs.argmax(dim=1), targets).sum().item()
            clock.tick()
        return clock.seconds()

    return turn


def bare_accumulating(case: Case, tuning: Tuning) -> Turn:
    """The bare loop with each batch cut into micro-batches, whose gradients add up in `.grad`."""
    if tuning.keep_memory:
        keep_freed_memory()
    model = case.build_model()
    criterion, optimizer = _parts(model, tuning.fused)
    assert case.micro_batch is not None
    size, parts = case.micro_batch, case.global_batch_size // case.micro_batch
    batches = case.batches(tuning.index_select)

    def turn() -> Seconds:
        clock = Clock(case.steps)
        train_loss, correct, total = 0.0, 0.0, 0
        for whole_inputs, whole_targets in batches:
            optimizer.zero_grad()
            for inputs, targets in zip(whole_inputs.split(size), whole_targets.split(size), strict=True):
                outputs = model(inputs)
                loss = criterion(outputs, targets) / parts
                loss.backward()
                train_loss += loss.item()
                total += targets.size(0)
                correct += torch.eq(outputs.argmax(dim=1), targets).sum().item()
            optimizer.step()
            clock.tick()
        return clock.seconds()

    return turn


class _Drawing(Console):
    """Draws its progress bar wherever stderr leads to."""

    def __init__(self, rank: int, world_size: int, log: Path | None) -> None:
        super().__init__(rank, world_size)
        if log is not None:
            self.log_to(log)
        self.draws = True


def experiment_of(case: Case, reduction: str, implementation: str = "fused") -> Experiment:
    """The case as an experiment of one epoch; the trainers' data set, model and loss are given to them directly."""
    return Experiment(
        name="benchmark",
        model=Component(name=case.model),
        data=Component(name="random"),
        optimizer=Optimizer(name="sgd", implementation=implementation, **SETTINGS),
        global_batch_size=case.global_batch_size,
        micro_batch=case.micro_batch,
        reduction=reduction,
    )


def splits_of(case: Case) -> Splits:
    """The case's samples in memory; where an epoch needs more than there are, they are used again."""
    inputs, targets = case.tensors()
    return Splits(InMemory(inputs, targets, case.global_batch_size * (case.steps + 1)), None, CLASSES, None, "")


def trainer_turn(
    experiment: Experiment, steps: int, layout: Layout, model: nn.Module, splits: Splits, collectives: Collectives
) -> Seconds:
    """One run of `Trainer.train` with everything on that a real run has, but for the guard.

    That is metrics, log, progress bar, heartbeat, check for NaN, stop request and checkpoints. The guard compares
    ranks in a run's first steps, and a turn has few others: `benchmarks.guard` measures it over whole runs. `step` and
    `cpu` are from the first step's end to the last one's; `run` is all of `train`, with the first step and the digest
    and checkpoint at the epoch's end, until they are on disk.
    """
    clock = Clock(steps)
    assert isinstance(experiment.optimizer, Optimizer)
    optimizer = build_optimizer(experiment.optimizer, model, experiment.global_batch_size)
    first = collectives.world.is_first
    with tempfile.TemporaryDirectory() as scratch, StopRequest() as stop:
        place = Path(scratch)
        console = _Drawing(collectives.world.rank, collectives.world.world_size, place / "log.txt" if first else None)
        with (
            closing(console),
            MetricsWriter(place / "metrics.jsonl" if first else None) as metrics,
            Checkpointer(place / "checkpoints", asynchronous=True) if first else nullcontext() as checkpointer,
        ):
            job = Job(
                experiment=experiment,
                layout=layout,
                options=Options(reduction=experiment.reduction, guard="off"),
                parts=BuiltExperiment(model, cross_entropy, splits, optimizer, class_hits),
                collectives=collectives,
                console=console,
                metrics=metrics,
                stop=stop,
                run=RunAccess(checkpointer=checkpointer),
                observers=[Heartbeat(place, collectives.world), clock],
            )
            with closing(build_trainer(job)) as trainer:
                started = time.perf_counter()
                trainer.train()
                if checkpointer is not None:
                    checkpointer.wait()
                whole = time.perf_counter() - started
    return clock.seconds() | {"run": whole / (steps + 1)}


def ours(case: Case, reduction: str = "plain", implementation: str = "fused") -> Turn:
    """This project's trainer, in one process."""
    choose_kernels()
    keep_freed_memory()
    splits, collectives = splits_of(case), Collectives(World(), torch.device("cpu"))
    experiment = experiment_of(case, reduction, implementation)
    return lambda: trainer_turn(experiment, case.steps, Layout(), case.build_model(), splits, collectives)


def fabric(case: Case) -> Turn:
    """Lightning Fabric around the bare loop."""
    import_torchvision()  # lightning does, through torchmetrics
    from lightning.fabric import Fabric

    lightning_fabric = Fabric(accelerator="cpu", devices=1)
    model = case.build_model()
    criterion, raw_optimizer = _parts(model)
    prepared, optimizer = lightning_fabric.setup(model, raw_optimizer)
    batches: Any = case.batches()
    if case.data_loader:
        batches = lightning_fabric.setup_dataloaders(batches)

    def turn() -> Seconds:
        clock = Clock(case.steps)
        train_loss, correct, total = 0.0, 0.0, 0
        for inputs, targets in batches:
            outputs = prepared(inputs)
            loss = criterion(outputs, targets)
            optimizer.zero_grad()
            lightning_fabric.backward(loss)
            optimizer.step()
            train_loss += loss.item()
            total += targets.size(0)
            correct += torch.eq(outputs.argmax(dim=1), targets).sum().item()
            clock.tick()
        return clock.seconds()

    return turn


def accelerate(case: Case) -> Turn:
    """Hugging Face Accelerate around the bare loop."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = case.build_model()
    criterion, raw_optimizer = _parts(model)
    prepared, optimizer = accelerator.prepare(model, raw_optimizer)
    batches: Any = case.batches()
    if case.data_loader:
        batches = accelerator.prepare(batches)

    def turn() -> Seconds:
        clock = Clock(case.steps)
        train_loss, correct, total = 0.0, 0.0, 0
        for inputs, targets in batches:
            outputs = prepared(inputs)
            loss = criterion(outputs, targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            train_loss += loss.item()
            total += targets.size(0)
            correct += torch.eq(outputs.argmax(dim=1), targets).sum().item()
            clock.tick()
        return clock.seconds()

    return turn


def lightning(case: Case) -> Turn:
    """Lightning's Trainer at its leanest: no logger, no checkpoint, no progress bar, no model summary."""
    import_torchvision()
    import lightning as pl

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clock = Clock(case.steps)

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = case.build_model()
            self.criterion = nn.CrossEntropyLoss()
            self.train_loss, self.correct, self.total = 0.0, 0.0, 0

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            inputs, targets = batch
            outputs = self.model(inputs)
            loss: Tensor = self.criterion(outputs, targets)
            self.train_loss += loss.item()
            self.total += targets.size(0)
            self.correct += torch.eq(outputs.argmax(dim=1), targets).sum().item()
            return loss

        def on_train_batch_end(self, *_: object) -> None:
            clock.tick()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.model.parameters(), **SETTINGS)

    module, batches = Module(), case.batches()

    def turn() -> Seconds:
        nonlocal clock
        clock = Clock(case.steps)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, batches)
        return clock.seconds()

    return turn


PEERS: dict[str, tuple[str, Callable[[Case], Turn]]] = {
    "Lightning Fabric": ("lightning", fabric),
    "Accelerate": ("accelerate", accelerate),
    "Lightning": ("lightning", lightning),
}
"""Name, the package that must be there, builder."""
