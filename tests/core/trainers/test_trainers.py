"""The trainers in one process, without files: steps compared with the textbook, and the decisions during a run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ddp_core.base.digests import optimizer_digest, weights_digest
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.checkpoint import Checkpointer, find_checkpoints, load
from ddp_core.config.experiment import Component, Evaluation, Experiment, Optimizer, Schedule
from ddp_core.config.layout import Layout
from ddp_core.config.options import Options
from ddp_core.data.splits import InMemory, Splits
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.stop import Stopped, StopRequest
from ddp_core.distributed.world import World
from ddp_core.model.averaging import WeightAverage
from ddp_core.model.losses import class_hits, cross_entropy, mean_squared_error
from ddp_core.model.optimizers import build_optimizer
from ddp_core.observe.callback import Callback
from ddp_core.observe.faults import FaultScript
from ddp_core.observe.metrics import Console, MetricsWriter
from ddp_core.observe.step import StepBatch, StepObserver, StepReport
from ddp_core.sampler import GlobalOrder
from ddp_core.trainers import Job, Trainer, build_trainer, data_parallel
from ddp_core.trainers.evaluation import evaluate
from ddp_core.trainers.passes import InPrecision, Passes
from ddp_core.trainers.train_state import TrainState

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
    **options: Any,
) -> Iterator[Trainer]:
    torch.manual_seed(record.seed)
    job = Job(
        experiment=record,
        layout=layout or Layout(device="cuda" if device.type == "cuda" else "cpu"),
        options=Options(reduction=record.reduction, **options),
        model=build(),
        loss=cross_entropy,
        hits=class_hits,
        splits=Splits(samples(64) if train is None else train, test, CLASSES, None, ""),
        collectives=collectives or Collectives(World(), device),
        device=device,
        console=Console(),
        metrics=MetricsWriter(None),
        stop=stop or StopRequest(),
        observers=[FaultScript(faults), *observers],
        callbacks=callbacks,
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
    return weights_digest(trainer.model.state_dict()), optimizer_digest(trainer.state.optimizer.state_dict())


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
    assert_close(finished(record).model, textbook(record, samples(64)))


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("last_batch", ["drop", "keep"])
def test_threads_end_with_the_bits_of_one_process(count: int, last_batch: str) -> None:
    record = experiment(reduction="exact", epochs=2, last_batch=last_batch, **RECIPES["adamw"])
    # 70 = 4 * 16 + 6: a kept last batch has micro-batches of 4 and 2 samples, so a third and fourth replica stay idle.
    details: dict[str, Any] = {"train": samples(70)}
    alone = finished(record, batch_norm_and_dropout, **details)
    together = finished(record, batch_norm_and_dropout, Layout(kind="dp", nproc_per_node=count), **details)
    assert digests(together) == digests(alone)


def test_replicas_may_have_devices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with a number is another device for all but torch itself."""
    record, layout = experiment(reduction="exact", precision="bf16"), Layout(kind="dp", nproc_per_node=3)
    alone = finished(record, batch_norm_and_dropout)
    monkeypatch.setattr(data_parallel, "_device_of", lambda job, number: torch.device("cpu", number))
    with trainer_of(record, batch_norm_and_dropout, layout) as together:
        assert isinstance(together, data_parallel.DataParallelTrainer)
        assert len({id(replica.passes) for replica in together.replicas}) == 3
        together.train()
    assert digests(together) == digests(alone)


class Recomputing(nn.Module):
    """Computes its first layers again in backward, with dropout among them or not."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(dropout), nn.Tanh())
        self.last = nn.Linear(16, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, rows, use_reentrant=False))


def test_replicas_in_threads_refuse_dropout_that_is_computed_again() -> None:
    """The second computation would drop other units than the first, and gradients would be wrong without a word."""
    record, dp = experiment(reduction="exact", epochs=1), Layout(kind="dp", nproc_per_node=2)
    assert digests(finished(record, lambda: Recomputing(0), dp)) == digests(finished(record, lambda: Recomputing(0)))
    with pytest.raises(UserError, match=r"backward draws random numbers .*use --layout ddp"):
        finished(record, lambda: Recomputing(0.3), dp)


@pytest.mark.parametrize("count", [2, 4])
def test_threads_in_plain_reduction_agree_up_to_rounding(count: int) -> None:
    record = experiment(epochs=2)
    together = finished(record, layout=Layout(kind="dp", nproc_per_node=count))
    assert_close(together.model, finished(record).model)


def test_keys_by_replica_would_give_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: dropout that depends on the replica gives other bits."""
    from ddp_core.trainers import keyed_random

    record, dp = experiment(reduction="exact"), Layout(kind="dp", nproc_per_node=2)
    expected = digests(finished(record, batch_norm_and_dropout))
    assert digests(finished(record, batch_norm_and_dropout, dp)) == expected
    made: list[Any] = []

    class ByReplica(keyed_random.KeyedRandom):
        def __init__(self, seed: int, device: torch.device) -> None:
            made.append(self)
            super().__init__(seed + len(made), device)

    monkeypatch.setattr("ddp_core.trainers.data_parallel.KeyedRandom", ByReplica)
    assert digests(finished(record, batch_norm_and_dropout, dp)) != expected


@pytest.mark.parametrize("layout", [Layout(), Layout(kind="dp", nproc_per_node=2)], ids=lambda layout: layout.kind)
def test_batch_norm_has_its_momentum_back_afterwards(layout: Layout) -> None:
    trainer = finished(experiment(reduction="exact"), batch_norm_and_dropout, layout)
    (norm,) = [module for module in trainer.model.modules() if isinstance(module, nn.BatchNorm1d)]
    assert norm.momentum == 0.1
    assert norm.num_batches_tracked == trainer.total_steps


@pytest.mark.parametrize("layout", [Layout(), Layout(kind="dp", nproc_per_node=2)], ids=lambda layout: layout.kind)
@pytest.mark.parametrize("reduction", ["plain", "exact"])
def test_a_loss_that_is_not_finite_ends_the_run_before_the_step(layout: Layout, reduction: str) -> None:
    data = samples(64)
    record = experiment(reduction=reduction, epochs=2)
    ids = GlobalOrder(64, 0).ids(0, 32, 48)
    data.inputs[ids[13]] = math.nan
    with trainer_of(record, layout=layout, train=data) as trainer:
        with pytest.raises(UserError) as raised:
            trainer.train()
        assert raised.value.exit_code == ExitCode.NUMERICS
        message = str(raised.value)
        assert "nan at step 3" in message
        assert ("replica 1" if layout.kind == "dp" else "rank 0") in message
        assert all(str(number) in message for number in ids[12:16])
        assert trainer.state.step == 2
        weights = weights_digest(trainer.model.state_dict())
    good = finished(experiment(reduction=reduction, max_steps=2), layout=layout)
    assert weights == weights_digest(good.model.state_dict())


def test_a_bad_step_can_be_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    data = samples(64)
    data.inputs[GlobalOrder(64, 0).ids(0, 32, 48)[13]] = math.inf
    trainer = finished(experiment(epochs=1), train=data, on_nan="skip")
    assert trainer.state.step == 4
    assert all(torch.isfinite(value).all() for value in trainer.model.state_dict().values())
    assert "step skipped" in capsys.readouterr().out
    assert trainer.state.last_epoch_loss is not None
    assert math.isfinite(trainer.state.last_epoch_loss)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", [Layout(), Layout(kind="dp", nproc_per_node=3)], ids=lambda layout: layout.kind)
def test_mixed_precision_learns_and_has_one_digest(precision: str, layout: Layout) -> None:
    fields: dict[str, Any] = {"epochs": 3, "reduction": "exact", **RECIPES["sgd"]}
    trainer = finished(experiment(precision=precision, **fields), layout=layout)
    alone = finished(experiment(precision=precision, **fields))
    assert digests(trainer) == digests(alone)
    full = finished(experiment(**fields))
    assert digests(full) != digests(alone), "autocast was not on"
    assert_close(alone.model, full.model, tolerance=0.05)
    scaler = trainer.state.scaler
    assert (scaler is not None) == (precision == "fp16")
    assert all(value.dtype == torch.float32 for value in trainer.model.state_dict().values())


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


@pytest.mark.parametrize("layout", [Layout(), Layout(kind="dp", nproc_per_node=2)], ids=lambda layout: layout.kind)
def test_the_scaler_backs_off_when_a_gradient_overflows(layout: Layout) -> None:
    record = experiment(precision="fp16", reduction="exact", optimizer={"lr": 1e-3}, epochs=1)
    data = samples(64)
    data.inputs.mul_(2000)
    with trainer_of(record, layout=layout, train=data) as trainer:
        assert trainer.state.scaler is not None
        before = trainer.state.scaler.get_scale()
        trainer.train()
        assert trainer.state.scaler.get_scale() < before
        assert all(torch.isfinite(value).all() for value in trainer.model.state_dict().values())


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
    assert trainer.state.evaluation.keys() == {"test_loss", "test_accuracy"}
    assert trainer.state.best >= trainer.state.evaluation["test_accuracy"] > 0
    frozen = finished(experiment(epochs=1, optimizer={"lr": 1e-30}), train=samples(64))
    data = samples(64)
    expected = functional.cross_entropy(frozen.model(data.inputs), data.targets).item()
    assert frozen.state.last_epoch_loss == pytest.approx(expected, rel=1e-5)


def test_a_run_may_end_inside_an_epoch() -> None:
    trainer = finished(experiment(epochs=5, max_steps=6), test=samples(30, seed=9))
    assert trainer.state.step == trainer.total_steps == 6
    assert trainer.state.evaluation
    expected = finished(experiment(epochs=1), test=samples(30, seed=9))
    assert trainer.steps_per_epoch == expected.steps_per_epoch == 4


@pytest.mark.parametrize("length", [{"epochs": 3}, {"epochs": 5, "max_steps": 6}], ids=["epochs", "max_steps"])
def test_what_a_run_ends_with_is_evaluated_whenever_that_is(length: dict[str, int]) -> None:
    """By `every_epochs` no epoch of these runs is due."""
    evaluation = Evaluation(every_epochs=4)
    trainer = finished(experiment(evaluation=evaluation, **length), test=samples(30, seed=9))
    assert trainer.state.evaluation == trainer.evaluate()


def test_a_request_to_stop_is_met_at_the_next_step() -> None:
    stop = StopRequest()
    with trainer_of(experiment(), stop=stop) as trainer:
        update = trainer.update_weights

        def ask_in_step_two(batch: Any) -> None:
            if batch.step == 1:
                stop.reason = "SIGTERM"
            update(batch)

        trainer.update_weights = ask_in_step_two  # type: ignore[method-assign]
        with pytest.raises(Stopped) as raised:
            trainer.train()
    assert raised.value.step == 3
    assert raised.value.exit_code == ExitCode.STOPPED
    assert "SIGTERM" in str(raised.value)


def test_a_time_limit_is_a_request_to_stop() -> None:
    with (
        trainer_of(experiment(), stop=StopRequest(max_seconds=0)) as trainer,
        pytest.raises(Stopped, match="time limit"),
    ):
        trainer.train()


def test_a_state_taken_in_the_middle_goes_on_to_the_same_bits() -> None:
    record = experiment(
        reduction="exact",
        epochs=3,
        precision="fp16",
        **RECIPES["adamw"],
        schedule={"name": "cosine", "warmup_steps": 2},
    )
    expected = finished(record, batch_norm_and_dropout)
    for taken_at in (1, 4, 7):
        saved: dict[str, Any] = {}
        with trainer_of(record, batch_norm_and_dropout, faults=(f"raise@{taken_at}",)) as trainer:
            with pytest.raises(RuntimeError, match="scripted"):
                trainer.train()
            saved = {
                name: torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, part)
                for name, part in trainer.state.state_dict().items()
            }
        with trainer_of(record, lambda: batch_norm_and_dropout(), Layout(kind="dp", nproc_per_node=3)) as trainer:
            trainer.state.load_state_dict(saved)
            trainer.train()
        assert digests(trainer) == digests(expected)
        assert trainer.state.last_epoch_loss == expected.state.last_epoch_loss


def _lived_in() -> TrainState:
    """A state of which every entry is another than in a fresh one."""
    state = _unlived_in()
    assert state.scaler is not None
    assert state.schedule is not None
    assert state.average is not None
    for _ in range(2):
        loss = state.model(samples(4).inputs).square().sum()
        state.scaler.scale(loss).backward()
        state.scaler.step(state.optimizer)
        state.scaler.update(3.0)
        state.schedule.step()
        state.average.update_parameters(state.model)
    for number, each in enumerate(dataclasses.fields(state), 1):
        if each.name in POSITION:
            kept = {"loss": float(number)} if each.name == "evaluation" else number
            setattr(state, each.name, kept)
    return state


def _unlived_in() -> TrainState:
    torch.manual_seed(0)
    model = batch_norm_and_dropout()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return TrainState(model, optimizer, torch.amp.GradScaler("cpu"), schedule, WeightAverage(model, 0.9))


PARTS = ("model", "optimizer", "scaler", "schedule", "average")
NOT_SAVED = ("learning_rate", "sharded", "fully_sharded")
POSITION = [each.name for each in dataclasses.fields(TrainState) if each.name not in (*PARTS, *NOT_SAVED)]


def _entries(state: TrainState) -> dict[str, Any]:
    """Every field of the state by its name, in plain values; of a part what its `state_dict` gives, entry by entry."""
    found: dict[str, Any] = {name: getattr(state, name) for name in POSITION}
    for part in PARTS:
        for path, value in torch.utils._pytree.tree_flatten_with_path(getattr(state, part).state_dict())[0]:
            name = part + torch.utils._pytree.keystr(path)
            found[name] = value.tolist() if isinstance(value, Tensor) else value
    return found


def test_every_entry_of_the_state_comes_back(tmp_path: Path) -> None:
    """A new field of TrainState is one more entry here, unless NOT_SAVED names it."""
    fresh, lived = _unlived_in(), _lived_in()
    expected, before = _entries(lived), _entries(fresh)
    unchanged = [
        name
        for name in (*POSITION, *PARTS)
        if all(before.get(entry) == value for entry, value in expected.items() if entry.startswith(name))
    ]
    assert unchanged == [], "nothing would be seen of their loss"
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(lived.state_dict(), step=lived.step, epoch=0)
    fresh.load_state_dict(load(find_checkpoints(tmp_path)[0]))
    assert _entries(fresh) == expected


def test_the_state_holds_tensors_and_plain_types_only() -> None:
    model = batch_norm_and_dropout()
    state = TrainState(
        model, build_optimizer(experiment(**RECIPES["adamw"]).optimizer, model), torch.amp.GradScaler("cpu")
    ).state_dict()

    def check(value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                assert isinstance(key, str | int)
                check(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                check(inner)
        else:
            assert value is None or isinstance(value, bool | int | float | str | Tensor), type(value)

    check(state)


def test_every_rank_sees_its_own_share_of_every_step() -> None:
    record = experiment(last_batch="keep", epochs=2)
    for count in (1, 2, 3, 4):
        with trainer_of(record, layout=Layout(kind="dp", nproc_per_node=count), train=samples(70)) as trainer:
            batches = trainer.batches
            assert batches.steps_per_epoch == 5
            for epoch in range(2):
                steps = range(epoch * 5, epoch * 5 + 5)
                ids = [np.concatenate([batches.ids(step, part) for part in batches.mine(step)]) for step in steps]
                assert sorted(np.concatenate(ids).tolist()) == list(range(70))
                assert [len(step) for step in ids] == [16, 16, 16, 16, 6]
                owners = [[batches.owner(step, part.index) for part in batches.mine(step)] for step in steps]
                assert all(step == sorted(step) for step in owners)


def test_a_loss_of_another_shape_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="as many numbers"):
        mean_squared_error(torch.zeros(4, 3), torch.zeros(4))


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
        assert self.trainer is not None
        assert self.trainer.state.step == batch.step + 1
        self._note("after_step", batch.step)

    def _note(self, moment: str, step: int) -> None:
        assert self.trainer is not None
        self.seen.append((moment, step))
        self.weights.append(weights_digest(self.trainer.model.state_dict()))


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


def test_observers_hear_of_a_skipped_step() -> None:
    data, recorder = samples(64), Recorder()
    data.inputs[GlobalOrder(64, 0).ids(0, 32, 48)[13]] = math.nan
    with trainer_of(experiment(), train=data, on_nan="skip", observers=(recorder,)) as recorder.trainer:
        recorder.trainer.train()
    assert [moment for moment, step in recorder.seen if step == 2] == [*MOMENTS[:3], "skipped", "after_step"]
    assert ("skipped", 1) not in recorder.seen
    assert [report.is_finite for report in recorder.reports] == [True, True, False, True]


@pytest.mark.parametrize("layout", [Layout(), Layout(kind="dp", nproc_per_node=2)], ids=lambda layout: layout.kind)
@pytest.mark.parametrize("reduction", ["plain", "exact"])
def test_a_skipped_step_changes_neither_weights_nor_buffers(layout: Layout, reduction: str) -> None:
    """The forward of the bad batch has made NaN of the batch-norm statistics."""
    data, recorder = samples(64), Recorder()
    data.inputs[GlobalOrder(64, 0).ids(0, 32, 48)[13]] = math.nan
    record, details = experiment(reduction=reduction), {"train": data, "on_nan": "skip", "observers": (recorder,)}
    with trainer_of(record, batch_norm_and_dropout, layout, **details) as recorder.trainer:
        recorder.trainer.train()
    before, after = (recorder.weights[recorder.seen.index((moment, 2))] for moment in ("before_step", "after_step"))
    assert after == before
    assert all(value.isfinite().all() for value in recorder.trainer.model.state_dict().values())


def test_a_job_stays_as_it_was_given() -> None:
    with trainer_of(experiment()) as trainer, pytest.raises(dataclasses.FrozenInstanceError):
        trainer.job.observers = ()  # type: ignore[misc]
