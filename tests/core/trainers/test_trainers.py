"""The trainers in one process, without files: their steps compared with the textbook and with each other."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ddp_core.base.digests import optimizer_digest, weights_digest
from ddp_core.checkpoint import Checkpointer
from ddp_core.config.experiment import Component, Experiment, Optimizer, Schedule
from ddp_core.config.layout import Layout
from ddp_core.config.options import Options
from ddp_core.data.splits import InMemory, Splits
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.stop import StopRequest
from ddp_core.distributed.world import World
from ddp_core.experiment.built import BuiltExperiment
from ddp_core.live.collectives import LiveCollectives
from ddp_core.model.losses import class_hits, cross_entropy
from ddp_core.model.optimizers import build_optimizer
from ddp_core.observe.callback import Callback, Moment
from ddp_core.observe.faults import FaultScript
from ddp_core.observe.metrics import Console, MetricsWriter
from ddp_core.observe.step import StepObserver
from ddp_core.sampler import GlobalOrder
from ddp_core.trainers import Job, RunAccess, Trainer, Trial, build_trainer
from ddp_core.trainers.passes import InPrecision, Passes
from tests.core.live.test_collectives import a_member
from tests.support.wording import refusing

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


def textbook(record: Experiment, data: InMemory, build: Callable[[], nn.Module] = mlp) -> nn.Module:
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


@pytest.mark.parametrize(
    ("micro_batch", "reduction"), [(None, "plain"), (8, "plain"), (3, "plain"), (8, "exact"), (3, "exact")]
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_the_textbooks(recipe: str, micro_batch: int | None, reduction: str) -> None:
    fields: dict[str, Any] = {"global_batch_size": 24 if micro_batch == 3 else 16, "epochs": 3, **RECIPES[recipe]}
    record = experiment(micro_batch=micro_batch, reduction=reduction, **fields)
    assert_close(finished(record).state.model, textbook(record, samples(64)))


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("last_batch", ["drop", "keep"])
def test_threads_end_with_the_bits_of_one_process(count: int, last_batch: str) -> None:
    record = experiment(reduction="exact", epochs=2, last_batch=last_batch, **RECIPES["adamw"])
    # 70 = 4 * 16 + 6: a kept last batch has micro-batches of 4 and 2 samples, so a third and fourth replica stay idle.
    details: dict[str, Any] = {"train": samples(70)}
    alone = finished(record, batch_norm_and_dropout, **details)
    together = finished(record, batch_norm_and_dropout, Layout(kind="dp", nproc_per_node=count), **details)
    assert digests(together) == digests(alone)


class Recomputing(nn.Module):
    """Computes its first layers again in backward, with dropout among them or not."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(dropout), nn.Tanh())
        self.last = nn.Linear(16, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, rows, use_reentrant=False))


@pytest.mark.parametrize("dropout", [0, 0.3])
def test_replicas_in_threads_draw_the_same_again_where_backward_computes_again(dropout: float) -> None:
    """With other draws the second computation would drop other units, and gradients would be wrong without a word."""
    record, dp = experiment(reduction="exact", epochs=1), Layout(kind="dp", nproc_per_node=2)
    alone = finished(record, lambda: Recomputing(dropout))
    assert digests(finished(record, lambda: Recomputing(dropout), dp)) == digests(alone)


@pytest.mark.parametrize("layout", [Layout(), Layout(kind="dp", nproc_per_node=2)], ids=lambda layout: layout.kind)
@pytest.mark.parametrize("reduction", ["plain", "exact"])
def test_a_loss_that_is_not_finite_ends_the_run_before_the_step(layout: Layout, reduction: str) -> None:
    data = samples(64)
    record = experiment(reduction=reduction, epochs=2)
    ids = GlobalOrder(64, 0).ids(0, 32, 48)
    data.inputs[ids[13]] = math.nan
    with trainer_of(record, layout=layout, train=data) as trainer:
        with refusing() as raised:
            trainer.train()
        assert all(str(number) in str(raised.value) for number in ids[12:16])
        assert trainer.state.step == 2
        weights = weights_digest(trainer.state.model.state_dict())
    good = finished(experiment(reduction=reduction, max_steps=2), layout=layout)
    assert weights == weights_digest(good.state.model.state_dict())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns_and_has_one_digest(precision: str) -> None:
    fields: dict[str, Any] = {"epochs": 3, "reduction": "exact", **RECIPES["sgd"]}
    alone, full = finished(experiment(precision=precision, **fields)), finished(experiment(**fields))
    together = finished(experiment(precision=precision, **fields), layout=Layout(kind="dp", nproc_per_node=3))
    assert digests(together) == digests(alone)
    assert digests(full) != digests(alone), "autocast was not on"
    assert_close(alone.state.model, full.state.model, tolerance=0.05)
    assert (together.state.scaler is not None) == (precision == "fp16")
    assert all(value.dtype == torch.float32 for value in together.state.model.state_dict().values())


def test_a_thread_of_nn_data_parallel_keeps_the_precision() -> None:
    """torch's threads take over that autocast is on, and not its dtype (torch/nn/parallel/parallel_apply.py)."""
    passes = Passes(experiment(precision="fp16"), cross_entropy, CPU)
    found = {}

    def apply(module: nn.Module) -> None:
        with torch.amp.autocast("cpu", enabled=True), torch.no_grad():
            found[type(module)] = module(torch.ones(2, FEATURES)).dtype

    linear = nn.Linear(FEATURES, CLASSES)
    for module in (linear, InPrecision(linear, passes)):
        with passes.autocast():
            thread = threading.Thread(target=apply, args=(module,))
            thread.start()
            thread.join()
    assert found == {nn.Linear: torch.bfloat16, InPrecision: torch.float16}


def test_a_run_that_is_only_tried_makes_the_first_steps_of_the_whole_one() -> None:
    record = experiment(epochs=3, schedule={"name": "cosine"}, evaluation={"samples_per_batch": 1})
    tried = finished(record, test=samples(5, 1), only_steps=2)
    whole: list[str] = []

    class AtStepTwo(Callback):
        def on_step(self, moment: Moment) -> None:
            if moment.step == 2:
                whole.append(weights_digest(moment.model.state_dict()))

    finished(record, callbacks=[AtStepTwo()])
    assert [weights_digest(tried.state.model.state_dict())] == whole
    first = samples(5, 1).__getitems__([0, 1])
    assert tried.state.position.evaluation["test_loss"] == pytest.approx(
        functional.cross_entropy(tried.state.model(first[0]), first[1]).item()
    )


@pytest.mark.parametrize("moment", ["receive", "make"])
def test_a_step_that_another_rank_ends_has_changed_no_batch_statistics(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses come after the gradients: a rank may be lost between them, when the statistics are in the model."""
    record = experiment(reduction="exact", epochs=2)
    live = LiveCollectives(World(), CPU, a_member())
    with trainer_of(record, batch_norm_and_dropout, collectives=live) as trainer:
        owner = trainer.strategy.losses if moment == "receive" else trainer.loop.update
        usual, before = getattr(owner, moment), dict[str, Tensor]()

        def lost(asked: Any) -> Any:
            if trainer.state.step == 3:
                raise ConnectionError("lost")
            return usual(asked)

        def note(_: Any) -> None:
            if trainer.state.step == 3:
                before.update({name: value.clone() for name, value in trainer.state.model.state_dict().items()})

        monkeypatch.setattr(trainer.loop.observers, "settle", note)
        monkeypatch.setattr(owner, moment, lost)
        with pytest.raises(ConnectionError):
            trainer.train()
    held = trainer.state.marked()
    assert held["position"]["step"] == 3
    assert all(torch.equal(value, before[name]) for name, value in held["model"].items())
