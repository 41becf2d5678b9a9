"""Forward and backward of a micro-batch as CUDA graphs: the host launches hundreds of kernels by two calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.base.seeds import generators_kept
from ddp_core.base.torch_internals import foreach_add_, foreach_copy_
from ddp_core.base.trees import Tree, map_tensors, tensors_of
from ddp_core.config.experiment import Experiment
from ddp_core.model.losses import Loss
from ddp_core.reduction import take_gradients
from ddp_core.trainers.passes import Passes

Replay = Callable[[], None]

_WARM_UPS = 3
"""Passes before recording, as many as torch.cuda.make_graphed_callables makes: libraries set themselves up in them."""


class CudaRecorder:
    """Records CUDA graphs, which share their memory: they must be replayed in the sequence of their recording."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], None]) -> None:
        """Run the function where it will be recorded."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            function()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def record(self, function: Callable[[], None]) -> Replay:
        """Record what the function launches, without running it; the function that is returned here replays that."""
        graph, cause = torch.cuda.CUDAGraph(), None
        # Puts the stream back also where the end of a recording raises.
        with torch.cuda.stream(self._stream):
            try:
                # In the other modes, what the threads do that load data or watch NCCL would end the recording.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    try:
                        function()
                    except Exception as error:
                        cause = error
                        raise
            except Exception as error:
                # The end of a recording that was broken off raises an error of its own, which says less.
                raise cause or error from None
        return graph.replay


class GraphedPasses(Passes):
    """Passes that replay the first micro-batch's kernels for every other one of its shapes: the same kernels and bits.

    A micro-batch of other shapes (the last one of an epoch, or texts of another length), or with layers in another mode
    than the first, is computed without a graph. The module must be the model itself, without DistributedDataParallel,
    and launch the same kernels every time; what it counts in Python, outside of its buffers, it counts while recording
    only. Raises UserError where a model's work cannot be recorded, because it reads numbers from the device.

    Random numbers are keyed as without a graph: at each replay torch hands the kernels its generator's seed and offset
    as they are then (`CUDAGeneratorState::replay_prologue`, aten/src/ATen/cuda/CUDAGeneratorImpl.cpp). Autocast's cache
    of rounded weights begins and ends within the recorded forward, so that each replay rounds them anew.
    """

    def __init__(self, experiment: Experiment, loss: Loss, device: torch.device) -> None:
        super().__init__(experiment, loss, device)
        self._recorder = CudaRecorder(device)
        self._recorded: _Recorded | None = None
        # Where the recorded kernels read the loss_weight, and where they leave the loss.
        self._weight = torch.ones((), device=device)
        self._loss_left = torch.zeros((), device=device)
        self._replayed: Tensor | None = None

    def loss(self, module: nn.Module, inputs: Tree, targets: Tree) -> Tensor:
        """The loss of one micro-batch from the loader; from a replay, it serves `backward` but not autograd."""
        if not torch.is_grad_enabled():
            return super().loss(module, inputs, targets)
        batch = (inputs, targets)
        if self._recorded is None:
            self._recorded = self._record(module, batch)
        if self._recorded.signature != _signature(self._recorded.modules, self._recorded.weights, batch):
            return super().loss(module, inputs, targets)
        for ours, theirs in zip(self._recorded.inputs, tensors_of(batch), strict=True):
            ours.copy_(theirs, non_blocking=True)
        self._recorded.forward()
        # A copy, because the next replay leaves its loss in the same place.
        self._replayed = self._loss_left.detach().clone()
        return self._replayed

    def forget(self) -> None:
        """Record anew, in a pool of memory of its own: the reduction has other memory for batch-norm statistics."""
        self._recorder, self._recorded = CudaRecorder(self._device), None

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        if self._recorded is None or loss is not self._replayed:
            super().backward(loss, weight)
            return
        self._replayed = None
        self._weight.copy_(weight)
        self._recorded.backward()
        _add_to_gradients(self._recorded.parameters, self._recorded.gradients)

    def _record(self, module: nn.Module, batch: Tree) -> _Recorded:
        """Record a forward and a backward; gradients, buffers and generators are afterwards as before."""
        static = map_tensors(lambda tensor: torch.empty_like(tensor, device=self._device).copy_(tensor), batch)
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        buffers = list(module.buffers())
        values, kept = [buffer.clone() for buffer in buffers], take_gradients(parameters)

        def forward() -> None:
            self._loss_left = Passes.loss(self, module, *static)

        def backward() -> None:
            self._loss_left.backward(self._weight)

        def both() -> None:
            forward()
            backward()
            take_gradients(parameters)

        with generators_kept(self._device):
            for _ in range(_WARM_UPS):
                self._recorder.warm_up(both)
            try:
                replays = self._recorder.record(forward), self._recorder.record(backward)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise UserError(
                    f"this model's work cannot be recorded as a CUDA graph ({str(error).partition(chr(10))[0]}); "
                    "leave out --cuda-graph"
                ) from error
        gradients = take_gradients(parameters)
        # Without its history, which holds what autograd has recorded.
        self._loss_left = self._loss_left.detach()
        with torch.no_grad():
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
        modules, weights = [*module.modules()], [*module.parameters()]
        signature = _signature(modules, weights, batch)
        return _Recorded(signature, modules, weights, [*tensors_of(static)], *replays, parameters, gradients)


class _Recorded(NamedTuple):
    """A recorded micro-batch."""

    signature: Tree
    modules: list[nn.Module]
    weights: list[nn.Parameter]
    """All parameters, also those that are not trained."""
    inputs: list[Tensor]
    """What the forward reads: inputs and targets."""
    forward: Replay
    backward: Replay
    parameters: list[nn.Parameter]
    """Those that are trained."""
    gradients: list[Tensor | None]
    """What the backward leaves, by parameter; each replay overwrites them."""


def _signature(modules: Sequence[nn.Module], weights: Sequence[nn.Parameter], batch: Tree) -> Tree:
    """What decides which kernels are launched: the modes of the layers, what is trained, shapes and types."""
    shapes = map_tensors(lambda tensor: (tensor.shape, tensor.dtype), batch)
    return [*map(attrgetter("training"), modules)], [*map(attrgetter("requires_grad"), weights)], shapes


@torch.no_grad()
def _add_to_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    """Add the gradients to each `.grad`, which begins as a copy: the next replay overwrites `gradients`."""
    begun: list[tuple[Tensor, Tensor]] = []
    fresh: list[tuple[Tensor, Tensor]] = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and parameter.grad is not None:
            begun.append((parameter.grad, gradient))
        elif gradient is not None:
            parameter.grad = torch.empty_like(gradient)
            fresh.append((parameter.grad, gradient))
    for change, pairs in ((foreach_add_, begun), (foreach_copy_, fresh)):
        if pairs:
            change([ours for ours, _ in pairs], [theirs for _, theirs in pairs])
