"""Recorded micro-batches, as graphs of a CUDA device that is played: what is copied, kept, put back and refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.cli.prepare import check_request, prepare
from ddp_core.config.options import Asked
from ddp_core.trainers.graphed import CudaRecorder, GraphedPasses
from tests.core.trainers.builders import experiment
from tests.gpu_standin.playing import on_devices
from tests.support.wording import refusing, said_as_before

CUDA = torch.device("cuda", 0)


class Branching(nn.Module):
    """Leaves a parameter out, and counts in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.used(inputs)


def difference(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).sum()


def passes() -> GraphedPasses:
    return GraphedPasses(experiment(), difference, CUDA)


def batch() -> tuple[Tensor, Tensor]:
    return torch.ones(3, 2, device=CUDA), torch.zeros(3, 1, device=CUDA)


def _gradients() -> None:
    model, recorded, weight = Branching().to(CUDA), passes(), torch.tensor(0.5, device=CUDA)
    with torch.no_grad():
        recorded.loss(model, *batch())
    assert recorded._recorded is None, "trial passes record nothing"
    model.calls.zero_()
    for count in (1, 2):
        loss = recorded.loss(model, *batch())
        recorded.backward(loss, weight)
        assert model.used.weight.grad.tolist() == [[1.5 * count] * 2]
    assert model.unused.weight.grad is None
    assert model.calls == 2, "once per micro-batch, and not while recording"
    kept = loss.clone()
    recorded.loss(model, *(1 - each for each in batch()))
    assert torch.equal(loss, kept), "a loss is read some steps later"


def test_gradients_are_copied_or_added() -> None:
    on_devices(1, _gradients)


CHANGES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "shape": lambda model, inputs, targets: (inputs[:2], targets[:2]),
    "type": lambda model, inputs, targets: (inputs, targets.double()),
    "mode": lambda model, *batch: (model.eval(), batch)[1],
    "frozen": lambda model, *batch: (model.used.bias.requires_grad_(False), batch)[1],
}


def _changed() -> None:
    for what, change in CHANGES.items():
        model, recorded = Branching().to(CUDA), passes()
        loss = recorded.loss(model, *batch())
        assert not loss.requires_grad, "it comes from a replay"
        recorded.backward(loss, torch.tensor(1.0, device=CUDA))
        loss = recorded.loss(model, *change(model, *batch()))
        assert loss.requires_grad, what
        recorded.backward(loss, torch.tensor(1.0, dtype=loss.dtype, device=CUDA))
        assert not model.used.weight.grad.isnan().any(), what
        recorded.forget()
        assert not recorded.loss(model, *change(model, *batch())).requires_grad, "it is recorded anew"


def test_what_would_launch_other_kernels_is_not_replayed() -> None:
    on_devices(1, _changed)


class ReadsTheDevice(Branching):
    """Whose work no graph can hold."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * inputs.sum().item()


def _refused() -> str:
    with pytest.raises(UserError) as raised:
        passes().loss(ReadsTheDevice().to(CUDA), *batch())
    return str(raised.value)


def test_a_model_that_cannot_be_recorded_is_named_in_one_line() -> None:
    said_as_before(on_devices(1, _refused))


def _broken_recordings() -> list[str]:
    """What is raised where the recorded function meets an error, and where it keeps it to itself."""
    said, usual = [], torch.cuda.current_stream()
    for kept in ((), (RuntimeError,)):

        def reads_the_device(kept: Any = kept) -> None:
            with contextlib.suppress(*kept):
                torch.cuda.synchronize()

        try:
            CudaRecorder(CUDA).record(reads_the_device)
        except RuntimeError as error:
            said.append(str(error))
        assert torch.cuda.current_stream() == usual
    return said


def test_what_broke_a_recording_is_raised_and_the_stream_is_put_back() -> None:
    """The end of a broken recording raises, too, before torch.cuda.graph puts the stream back."""
    first, second = on_devices(1, _broken_recordings)
    assert "operation not permitted when stream is capturing" in first
    assert "failed due to a previous error during capture" in second


@pytest.mark.parametrize(
    "asked",
    [
        {"device": "cpu"},
        {"device": "cuda", "layout": "dp"},
        {"device": "cuda", "layout": "ddp", "reduction": "plain"},
        {"device": "cuda", "faults": ("flip@3+:0",)},
    ],
)
def test_a_graph_that_cannot_be_had_is_refused(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    request = prepare(Asked(experiment="toy_mlp", cuda_graph=True, **asked), "ddp train")  # type: ignore[arg-type]
    with refusing() as raised:
        check_request(request, only_look=True)
    assert raised.value.exit_code == 2
