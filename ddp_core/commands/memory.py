"""Estimates how much memory training a model takes, before it is trained: one micro-batch is run and watched.

The memory at the peak is counted, not guessed. Weights and the optimizer's state are there all the time. Forward keeps
the tensors that backward will need (`torch.autograd.graph.saved_tensors_hooks` sees each). Backward frees them from the
last layer to the first, while it makes the weights' gradients. So the peak is somewhere within backward: this module
notes in which order saved tensors are used and gradients are made, and finds that moment. Backward also holds, for a
while, the gradients of one layer's output and input, here called gradients in flight. Not counted are the libraries'
workspaces, the CUDA context (some 500 MB beside the allocator's), and fragmentation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ddp_core.data.loader import Loader
from ddp_core.data.trees import Tree, tensors_of
from ddp_core.model.losses import Loss
from ddp_core.model.optimizers import implementation
from ddp_core.run.experiment_file import LoadedExperiment
from ddp_core.run.hooks import optimizer_of
from ddp_core.run.request import Parts
from ddp_core.spec.experiment import Experiment, Optimizer
from ddp_core.trainers.passes import call

BuildOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

_WATCHED_SAMPLES = 8
"""Enough for batch norm, few enough for any machine; the estimate is then scaled to the real micro-batch."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one replica on one device. `activations` is what forward keeps for one micro-batch."""

    weights: int
    gradients: int
    optimizer_state: int
    inputs: int
    activations: int
    in_backward: int
    """The most that saved tensors, gradients made so far, and gradients in flight take together."""
    in_update: int
    """All gradients, and the optimizer's temporary tensors."""
    averaged_weights: int = 0
    """The moving average of weights and buffers."""
    communication: int = 0
    """DistributedDataParallel's buckets: a second copy of the gradients."""

    @property
    def peak(self) -> int:
        """Bytes at the moment that needs most: in backward or in the update."""
        return self.standing + max(self.in_backward, self.in_update)

    @property
    def standing(self) -> int:
        """Bytes that live from step to step."""
        return self.weights + self.averaged_weights + self.optimizer_state + self.inputs + self.communication

    def table(self) -> list[tuple[str, int]]:
        """Names and bytes, for people."""
        rows = [
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("optimizer state", self.optimizer_state),
            ("inputs", self.inputs),
            ("activations", self.activations),
        ]
        more = [("averaged weights", self.averaged_weights), ("gradient buckets", self.communication)]
        return rows + [row for row in more if row[1]]


def estimate_memory(
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizer | BuildOptimizer,
    inputs: Tree,
    targets: Tree,
    growth: float = 1.0,
    bucketed: bool = False,
    averaged: bool = False,
) -> MemoryEstimate:
    """The memory that training `model` on micro-batches like this one takes, on the device that it is on.

    Runs one forward and backward. Weights and gradients stay as they were; batch-norm's running statistics change.
    `optimizer` is a built-in one's settings, or a function that makes another; the state of such an optimizer is made
    by a step on a copy of the model, and its temporary tensors are taken to be as large as the gradients.
    The micro-batch to estimate for has `growth` times the samples of this one: the parts that depend on the batch grow
    in proportion. `bucketed`: under DistributedDataParallel without gradient_as_bucket_view. `averaged`: with a moving
    average of the weights.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = _bytes([*model.parameters(), *model.buffers()])
    gradients = _bytes(parameters)
    activations, in_backward = _Watched(model, inputs, targets).run(loss, growth)
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimizer_state=_state_of(optimizer, model, gradients),
        inputs=round(growth * _bytes(tensors_of((inputs, targets)))),
        activations=activations,
        in_backward=in_backward,
        in_update=gradients + _in_passing(optimizer, parameters),
        averaged_weights=weights if averaged else 0,
        communication=gradients if bucketed else 0,
    )


def estimate_of(loaded: LoadedExperiment, parts: Parts) -> MemoryEstimate:
    """The memory of one replica of this experiment, on the CPU and in float32; a few samples are watched."""
    experiment = loaded.experiment
    ids = np.arange(min(samples_at_once(experiment), _WATCHED_SAMPLES, len(parts.splits.train)), dtype=np.int64)
    inputs, targets = Loader(parts.splits.train, collate=parts.splits.collate).fetch(0, ids)
    chosen = experiment.optimizer
    return estimate_memory(
        parts.model,
        parts.loss,
        chosen if isinstance(chosen, Optimizer) else partial(optimizer_of, loaded),
        inputs,
        targets,
        growth=samples_at_once(experiment) / len(ids),
        averaged=experiment.ema_decay is not None,
    )


def samples_at_once(experiment: Experiment) -> int:
    """The samples of one forward and backward that the estimate is for."""
    return experiment.micro_batch or experiment.global_batch_size


def _state_of(optimizer: Optimizer | BuildOptimizer, model: nn.Module, gradients: int) -> int:
    """Bytes of the optimizer's state; a built-in one keeps tensors of a parameter's size for each parameter."""
    if not isinstance(optimizer, Optimizer):
        return _measured_state(optimizer, copy.deepcopy(model))
    if optimizer.name == "sgd":
        return gradients if optimizer.momentum else 0
    return 2 * gradients


def _measured_state(build: BuildOptimizer, model: nn.Module) -> int:
    optimizer = build(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return _bytes(tensors_of(optimizer.state_dict()["state"]))


def _in_passing(optimizer: Optimizer | BuildOptimizer, parameters: Sequence[Tensor]) -> int:
    """Bytes of the optimizer's temporary tensors (torch/optim/{sgd,adam}.py).

    foreach on CUDA makes them for all parameters at once, the loop for one parameter after the other.
    """
    if not isinstance(optimizer, Optimizer):
        return _bytes(parameters)
    chosen = implementation(optimizer, parameters)
    if chosen == "fused" or not parameters:
        return 0
    adam = optimizer.name != "sgd"
    if not adam and not optimizer.nesterov and not optimizer.weight_decay:
        return 0
    if chosen == "foreach":
        return _bytes(parameters)
    return (2 if adam else 1) * max(_bytes([parameter]) for parameter in parameters)


class _Watched:
    """One forward and backward, with the order of events in backward."""

    def __init__(self, model: nn.Module, inputs: Tree, targets: Tree) -> None:
        self.model, self.inputs, self.targets = model, inputs, targets
        standing = [*model.parameters(), *model.buffers(), *tensors_of((inputs, targets))]
        self.standing = {tensor.untyped_storage().data_ptr() for tensor in standing}
        self.device = standing[0].device
        self.saved: dict[int, int] = {}
        """Bytes by the storage's address; addresses are unique as long as the graph holds all storages."""
        self.events: list[tuple[int, int]] = []
        """(storage used, 0) or (0, bytes of gradient made), in the order of backward."""

    def run(self, loss: Loss, growth: float) -> tuple[int, int]:
        """Bytes that forward keeps, and the most that is needed in backward."""
        handles = [
            parameter.register_post_accumulate_grad_hook(self._made)
            for parameter in self.model.parameters()
            if parameter.requires_grad
        ]
        before = [parameter.grad for parameter in self.model.parameters()]
        self.model.zero_grad(set_to_none=True)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._keep, self._use):
                value = loss(call(self.model, self.inputs), self.targets)
            kept = dict(self.saved)
            value.backward()
        finally:
            for handle in handles:
                handle.remove()
            for parameter, gradient in zip(self.model.parameters(), before, strict=True):
                parameter.grad = gradient
        return round(growth * sum(kept.values())), round(self._highest(kept, growth))

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.standing:
            self.saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def _use(self, tensor: Tensor) -> Tensor:
        self.events.append((tensor.untyped_storage().data_ptr(), 0))
        return tensor

    def _made(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.events.append((0, parameter.grad.untyped_storage().nbytes()))

    def _highest(self, kept: dict[int, int], growth: float) -> float:
        last_use = {storage: moment for moment, (storage, _) in enumerate(self.events) if storage in kept}
        alive, made, highest = growth * sum(kept.values()), 0.0, 0.0
        for moment, (storage, gradient) in enumerate(self.events):
            # During a layer's backward: the gradients of its output and of its input, each about as large as what it
            # kept.
            flying = 2 * growth * kept.get(storage, 0)
            if self.device.type == "cpu":
                # oneDNN keeps weights, and makes their gradients, in a memory format of its own, which takes copies.
                flying += 2 * gradient
            made += gradient
            highest = max(highest, alive + made + flying)
            if last_use.get(storage) == moment:
                alive -= growth * kept[storage]
        return highest


def _bytes(tensors: Iterable[Tensor]) -> int:
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())
