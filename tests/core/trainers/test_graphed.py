"""Recorded micro-batches, with a recorder in the place of CUDA graphs: what is copied, kept, put back and refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_core.cli.prepare import check_request, prepare
from ddp_core.config.options import Asked
from ddp_core.trainers.graphed import CudaRecorder, GraphedPasses, Replay
from tests.core.trainers.builders import CPU, experiment
from tests.gpu_standin.playing import on_devices
from tests.support.wording import refusing


class StandIn:
    """Runs the recorded function again at each replay, and leaves gradients where the recording had left them."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.warm_ups = self.replays = 0

    def warm_up(self, function: Callable[[], None]) -> None:
        self.warm_ups += 1
        function()

    def record(self, function: Callable[[], None]) -> Replay:
        function()
        static = [parameter.grad for parameter in self.parameters]

        def replay() -> None:
            self.replays += 1
            kept = [parameter.grad for parameter in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
            function()
            for parameter, left, before in zip(self.parameters, static, kept, strict=True):
                if left is not None:
                    assert parameter.grad is not None
                    left.copy_(parameter.grad)
                parameter.grad = before

        return replay


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


def passes_for(model: nn.Module) -> tuple[GraphedPasses, StandIn]:
    recorder = StandIn(model)
    return GraphedPasses(experiment(), difference, CPU, recorder), recorder


def test_gradients_are_copied_or_added() -> None:
    model = Branching()
    passes, recorder = passes_for(model)
    with torch.no_grad():
        passes.loss(model, torch.ones(3, 2), torch.zeros(3, 1))
    assert recorder.warm_ups == 0, "trial passes record nothing"
    model.calls.zero_()
    weight = torch.tensor(0.5)
    for count in (1, 2):
        loss = passes.loss(model, torch.ones(3, 2), torch.zeros(3, 1))
        passes.backward(loss, weight)
        assert model.used.weight.grad.tolist() == [[1.5 * count] * 2]
    assert model.unused.weight.grad is None
    assert model.calls == 2, "once per micro-batch, and not while recording"
    kept = loss.clone()
    passes.loss(model, torch.zeros(3, 2), torch.ones(3, 1))
    assert torch.equal(loss, kept), "a loss is read some steps later"


@pytest.mark.parametrize(
    "change",
    [
        lambda model, batch: (batch[0][:2], batch[1][:2]),
        lambda model, batch: (batch[0].double().float(), batch[1].double()),
        lambda model, batch: (model.eval(), batch)[1],
        lambda model, batch: (model.used.bias.requires_grad_(False), batch)[1],
    ],
    ids=["shape", "type", "mode", "frozen"],
)
def test_what_would_launch_other_kernels_is_not_replayed(change: Callable[[Any, Any], Any]) -> None:
    model = Branching()
    passes, recorder = passes_for(model)
    batch = (torch.ones(3, 2), torch.zeros(3, 1))
    passes.backward(passes.loss(model, *batch), torch.tensor(1.0))
    replays = recorder.replays
    loss = passes.loss(model, *change(model, batch))
    assert loss.requires_grad
    passes.backward(loss, torch.tensor(1.0, dtype=loss.dtype))
    assert recorder.replays == replays == 2


def test_a_model_that_cannot_be_recorded_is_named_in_one_line() -> None:
    class Refuses(StandIn):
        def record(self, function: Callable[[], None]) -> Replay:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    model = Branching()
    passes, _ = passes_for(model)
    passes._recorder = Refuses(model)
    with refusing() as raised:
        passes.loss(model, torch.ones(3, 2), torch.zeros(3, 1))
    assert "\n" not in str(raised.value)


def _broken_recordings() -> list[str]:
    """What is raised where the recorded function meets an error, and where it keeps it to itself."""
    said, usual = [], torch.cuda.current_stream()
    for kept in ((), (RuntimeError,)):

        def reads_the_device(kept: Any = kept) -> None:
            with contextlib.suppress(*kept):
                torch.cuda.synchronize()

        try:
            CudaRecorder(torch.device("cuda", 0)).record(reads_the_device)
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
