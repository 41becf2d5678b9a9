"""The losses of a step: what is sent and waited for, and one that is not finite and read only later, as on CUDA.

Here the CPU's fused optimizers hold updates back; what computes nothing is on the meta device.

Tests observe/step.py, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import UserError
from ddp_core.config.layout import Layout
from ddp_core.config.options import Options
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.world import World
from ddp_core.live.collectives import LiveCollectives
from ddp_core.model.averaging import WeightAverage
from ddp_core.observe.step import StepBatch
from ddp_core.sampler import GlobalOrder
from ddp_core.trainers import Trainer
from ddp_core.trainers.saving import first_not_finite
from ddp_core.trainers.step_losses import LossGate, StepLosses, steps_between_reading
from ddp_core.trainers.train_state import TrainState
from tests.core.live.test_collectives import a_member
from tests.core.trainers.builders import digests, experiment, finished, samples, trainer_of
from tests.support.wording import refusing

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OPTIMIZERS = {
    "sgd": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    "sgd without momentum": {"name": "sgd", "lr": 0.1},
    "adam": {"name": "adam", "lr": 0.01},
    "adamw": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
}


@pytest.fixture
def read_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let losses be read every ten steps, as on CUDA."""
    monkeypatch.setattr("ddp_core.trainers.assemble.steps_between_reading", lambda *_: 10)


def digests_with_average(trainer: Trainer) -> tuple[str, ...]:
    average = trainer.state.average
    return *digests(trainer), "" if average is None else weights_digest(average.module.state_dict())


@pytest.mark.usefixtures("read_rarely")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_update_is_made_from_the_first_bad_loss_on(optimizer: str, precision: str) -> None:
    fields: dict[str, Any] = {"reduction": "exact", "precision": precision, "optimizer": OPTIMIZERS[optimizer]}
    if precision == "fp32":
        fields["ema_decay"] = 0.9
    data = samples(256)
    ids = GlobalOrder(256, 0).ids(0, 32, 48)
    data.inputs[ids[13]] = math.nan
    with trainer_of(experiment(**fields), train=data) as trainer:
        with refusing() as raised:
            trainer.train()
        assert trainer.state.step == 9, "steps 4 to 10 were computed before the loss of step 3 was read"
        after = digests_with_average(trainer)
    assert all(str(number) in str(raised.value) for number in ids[12:16])
    good = samples(256)
    assert after == digests_with_average(finished(experiment(max_steps=2, **fields), train=good))


@pytest.mark.usefixtures("read_rarely")
@pytest.mark.parametrize("layout", [Layout(), Layout(kind="dp", nproc_per_node=2)], ids=lambda layout: layout.kind)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_reading_rarely_changes_no_bit(optimizer: str, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    record = experiment(reduction="exact", epochs=3, optimizer=OPTIMIZERS[optimizer], ema_decay=0.9)
    rarely = digests_with_average(finished(record, layout=layout))
    monkeypatch.undo()
    assert rarely == digests_with_average(finished(record, layout=layout))


@pytest.mark.usefixtures("read_rarely")
def test_losses_are_read_before_a_save() -> None:
    data = samples(256)
    data.inputs[GlobalOrder(256, 0).ids(0, 32, 48)[13]] = math.nan
    seen = r"\(seen after step 4, .*\), the checkpoint of step 2 is good"
    with trainer_of(experiment(), train=data, checkpoint_every=2) as trainer, pytest.raises(UserError, match=seen):
        trainer.train()


@pytest.mark.parametrize("loss", [0.0, math.nan])
def test_what_a_scaler_finds_and_what_the_losses_say_are_not_added(loss: float) -> None:
    """The fused kernels skip an update where `found_inf` is 1; at 2 they would make it."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    gate, scaler = LossGate(optimizer, CPU), torch.amp.GradScaler("cpu", 4.0)
    scaler.scale(torch.zeros(()))
    gate.see(torch.tensor([0.0, loss]))
    parameter.grad = torch.full((3,), math.inf)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [1.0] * 3
    assert scaler.get_scale() == 2.0
    parameter.grad = torch.ones(3)
    gate.see(torch.zeros(2))
    optimizer.step()
    assert parameter.tolist() == [1.0 if math.isnan(loss) else 0.0] * 3, "the gate stays closed"


class Others(torch.optim.AdamW):
    """It may do anything in its step, also with `found_inf`."""


def half_fused(model: nn.Module) -> torch.optim.Optimizer:
    first, second = model.parameters()
    return torch.optim.AdamW([{"params": [first]}, {"params": [second], "fused": False}], fused=True)


@pytest.mark.parametrize(
    ("make", "options", "device", "steps"),
    [
        ("fused", {}, CUDA, 7),
        ("fused", {}, CPU, 1),
        ("fused", {"on_nan": "skip"}, CUDA, 1),
        ("half fused", {}, CUDA, 1),
        ("another rule", {}, CUDA, 1),
        ("loop", {}, CUDA, 1),
    ],
)
def test_losses_are_read_rarely_where_the_device_holds_updates_back(
    make: str, options: dict[str, Any], device: torch.device, steps: int
) -> None:
    model = nn.Linear(3, 2)
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "fused": lambda: torch.optim.AdamW(model.parameters(), fused=True),
        "half fused": lambda: half_fused(model),
        "another rule": lambda: Others(model.parameters(), fused=True),
        "loop": lambda: torch.optim.AdamW(model.parameters(), foreach=False),
    }
    state = TrainState(model, made[make]())
    asked = Options(reduction="exact", log_every=7, **options)
    state.average = WeightAverage(model, 0.9)
    state.schedule = torch.optim.lr_scheduler.ConstantLR(state.optimizer)
    assert steps_between_reading(asked, state, Collectives(World(), device)) == steps
    assert steps_between_reading(asked, state, LiveCollectives(World(), device, a_member())) == 1


@pytest.mark.parametrize(("value", "on_nan"), [(math.inf, "stop"), (math.nan, "skip")])
def test_weights_that_are_not_finite_are_never_saved(
    value: float, on_nan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finite loss may have infinite gradients."""
    with trainer_of(experiment(epochs=2), on_nan=on_nan, checkpoint_every=2) as trainer:
        bias = dict(trainer.state.model.named_parameters())["2.bias"]
        trainer.state.model.register_buffer("mask", torch.full((2,), -math.inf))

        @torch.no_grad()
        def spoil(*_: Any) -> None:
            if trainer.state.step == 3:
                bias[1] = value

        noted: list[int] = []
        monkeypatch.setattr(trainer.saving, "_note_kept", lambda: noted.append(trainer.state.step))
        trainer.state.optimizer.register_step_post_hook(spoil)
        with refusing():
            trainer.train()
    assert noted == [2], "no digest vouches for what is not saved"


def test_large_weights_are_finite() -> None:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(3e38)
    state = TrainState(model, torch.optim.SGD(model.parameters()))
    assert first_not_finite(state.ownership.trained) is None
    model.weight.data[1, 2] = -math.inf
    assert first_not_finite(state.ownership.trained) == "weight"
    model.weight.requires_grad_(False)
    assert first_not_finite(state.ownership.trained) is None, "a frozen parameter may be a mask"


META = torch.device("meta")
BATCH = StepBatch(0, 0, 12, 12, [], [], [])


class TwoRanks(Collectives):
    """The sums of two ranks, of which the other one gives `theirs` to each tensor on the CPU."""

    def __init__(self, theirs: float = 0.0) -> None:
        super().__init__(World(0, 2), META)
        self.theirs = theirs
        self.finished: list[str] = []

    def start_sum(self, tensor: Tensor) -> Any:
        return tensor

    def finish_sum(self, begun: Any) -> None:
        self.finished.append(begun.device.type)
        if begun.device.type == "cpu":
            begun[0] += self.theirs


class Gone(TwoRanks):
    """The other rank is gone, which gloo alone notices."""

    def finish_sum(self, begun: Any) -> None:
        super().finish_sum(begun)
        raise RuntimeError("Connection closed by peer")


def sent(collectives: Collectives, stop: bool = False) -> StepLosses:
    losses = StepLosses(collectives, 3, lambda _: False, read_every=10)
    losses.put(1, torch.zeros((), device=META))
    losses.send(BATCH, stop)
    return losses


@pytest.mark.parametrize(("ours", "theirs"), [(False, 0.0), (True, 0.0), (False, 1.0), (True, 1.0)])
def test_a_request_to_stop_is_known_without_reading_the_device(
    ours: bool, theirs: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    collectives = TwoRanks(theirs)
    losses = sent(collectives, ours)
    monkeypatch.setattr(losses, "read", list)
    assert losses.receive(BATCH) == (ours or theirs > 0, [])
    assert collectives.finished == ["cpu", "meta"]
    ((*_, unread),) = losses._unread
    assert unread.device == META
    assert unread.shape[0] == 3


def test_a_lost_peer_is_met_before_the_device_is_waited_for() -> None:
    collectives = Gone()
    losses = sent(collectives)
    with pytest.raises(RuntimeError, match="closed by peer"):
        losses.receive(BATCH)
    assert collectives.finished == ["cpu"]
