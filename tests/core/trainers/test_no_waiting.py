"""A step in the middle of training makes the host wait for no device: steps on torch's `meta` device, watched.

A tensor on `meta` has a shape and no numbers, so reading one raises; copies between host and device show in what torch
dispatches. On CUDA the host waits for each of these: `.item()`, `.tolist()`, `bool(tensor)`, copies to the host, and
copies to the device that are not marked non_blocking, as `torch.tensor(…, device=…)` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ddp_core.base.torch_internals import TorchDispatchMode
from ddp_core.observe.step import StepBatch, StepObserver
from ddp_core.trainers.step_losses import LossGate
from tests.core.trainers.test_trainers import batch_norm_and_dropout, experiment, mlp, samples, trainer_of

META = torch.device("meta")
WARM_UP, STEPS = 2, 5
"""What is made once and kept is made in the first steps; then no step may wait."""


class EndedEarly(Exception):
    pass


class Waits(TorchDispatchMode):
    """Notes what the host would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        name = func.overloadpacket.__name__
        devices = [value.device.type for value in args if isinstance(value, Tensor)]
        if name == "_local_scalar_dense" and devices == ["meta"]:
            self.found.append("a number is read")
        elif name == "copy_" and len(set(devices)) == 2 and not (given.get("non_blocking") or args[2:3] == (True,)):
            self.found.append(f"copy_ to {devices[0]} from {devices[1]}")
        elif name == "_to_copy" and "device" in given and not given.get("non_blocking"):
            target = torch.device(given["device"]).type
            if {target, devices[0]} == {"cpu", "meta"}:
                self.found.append(f"a copy to {target} from {devices[0]}")
        return func(*args, **given)


class MadeFromNumbers(TorchFunctionMode):
    """Notes tensors that are made on the device from Python's numbers; torch dispatches nothing for them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and str(given.get("device")) == "meta":
            self.found.append(f"{func.__name__}({args[0]!r}, device=…)")
        return func(*args, **given)


class EndsEarly(StepObserver):
    def __init__(self, watched: Waits, made: MadeFromNumbers) -> None:
        self.watched, self.made = watched, made

    def after_step(self, batch: StepBatch) -> None:
        if batch.step + 1 == WARM_UP:
            self.watched.found.clear()
            self.made.found.clear()
        if batch.step + 1 == STEPS:
            raise EndedEarly


def waits(build: Callable[[], nn.Module], **fields: Any) -> list[str]:
    """What the host would wait for in the steps after the first ones, in the trainer's own loop."""
    fields = {"optimizer": {"implementation": "loop", "momentum": 0.9}, "schedule": {"name": "cosine"}} | fields
    watched, made = Waits(), MadeFromNumbers()
    with (
        trainer_of(
            experiment(**fields),
            build,
            train=samples(16 * (STEPS + 3)),
            observers=(EndsEarly(watched, made),),
            device=META,
            log_every=1000,
            # A step in which the guard checks something waits.
            guard="off",
        ) as trainer,
        made,
        watched,
    ):
        # The host reads losses rarely only with an optimizer that can be held back on the device: one of torch's fused
        # ones, and those do not run on meta. So the gate watches the losses here, and holds back another optimizer.
        losses = trainer.strategy.losses
        losses._read_every, losses._gate = STEPS + 1, LossGate(torch.optim.SGD([torch.zeros(1)]), META)
        # In steps 1, 2, 4, 8, … the weights are looked at by their values; these are later ones.
        trainer.strategy.reduction._steps = 2**10  # type: ignore[attr-defined]
        # After the first update it is tried whether a checkpoint could hold the optimizer's state.
        trainer.loop.update._is_saveable = True
        with pytest.raises(EndedEarly):
            trainer.train()
    return watched.found + made.found


@pytest.mark.parametrize("reduction", ["exact", "plain"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"clip_norm": 1.0}, {"ema_decay": 0.9}, {"optimizer": {"name": "adamw", "implementation": "loop"}}],
    ids=["sgd", "clipping", "averaging", "adamw"],
)
def test_a_step_waits_for_no_device(reduction: str, fields: dict[str, Any]) -> None:
    assert waits(mlp, reduction=reduction, **fields) == []


@pytest.mark.parametrize("reduction", ["exact", "plain"])
def test_nor_does_one_with_batch_norm_and_dropout(reduction: str) -> None:
    assert waits(batch_norm_and_dropout, reduction=reduction) == []


class Reads(nn.Module):
    """A model that decides by a number."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs if inputs.sum() > 0 else -inputs


class Makes(nn.Module):
    """A model that makes a tensor from a number in each forward."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * torch.tensor(2.0, device=inputs.device) + torch.ones(1).to(inputs.device)


def test_what_waits_is_found() -> None:
    """A control: without it the tests above could be blind."""
    assert waits(lambda: nn.Sequential(mlp(), Makes()))[:1] == ["a copy to meta from cpu"]
    assert any("device=…" in line for line in waits(lambda: nn.Sequential(mlp(), Makes())))
    with pytest.raises(RuntimeError, match="meta"):
        waits(lambda: nn.Sequential(mlp(), Reads()))
