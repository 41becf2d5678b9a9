"""How much memory one replica takes, estimated from one watched micro-batch, for the claims that judge the estimate.

The memory at the peak is counted. Weights and the optimizer's state are there all the time. Forward keeps the tensors
that backward will need (`torch.autograd.graph.saved_tensors_hooks` sees each). Backward frees them from the last layer
to the first, while it makes the weights' gradients, and holds for a while the gradients of one layer's output and
input. Not counted are the CUDA context and fragmentation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ddp_core.config.experiment import Optimizer
from ddp_core.model.losses import Loss
from ddp_core.model.optimizers import implementation

LIBRARIES = 15_000_000
"""What a process on the CPU takes with its first step beside tensors: kernels that are loaded then, and their
workspaces. Of small runs of digits and char_transformer, 12 to 15 MB for a rank of two, 22 MB for one process."""


class BackwardEvent(NamedTuple):
    """One event of backward, in bytes: a saved tensor is used, and freed if not used again, or a gradient is made."""

    used: int = 0
    freed: int = 0
    gradient: int = 0


@dataclass(frozen=True)
class Backward:
    """What forward and backward of the watched micro-batch took."""

    activations: int
    """Bytes that forward keeps for backward; they grow with the batch, gradients do not."""
    copies: int
    """How many more copies of a gradient there are while it is made."""
    history: tuple[BackwardEvent, ...]

    def highest(self, growth: float) -> int:
        """The most bytes at a time, of what does not live from step to step, in a batch `growth` times as large."""
        alive, made, highest = growth * self.activations, 0, 0.0
        for event in self.history:
            # During a layer's backward: the gradients of its output and of its input, each about as large as what it
            # kept.
            flying = 2 * growth * event.used + self.copies * event.gradient
            made += event.gradient
            highest = max(highest, alive + flying + made)
            alive -= growth * event.freed
        return round(highest)


def estimate_memory(
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizer,
    inputs: Tensor,
    targets: Tensor,
    growth: float = 1.0,
    bucketed: bool = False,
) -> int:
    """The bytes at the peak of one replica that trains on micro-batches `growth` times as large as this one.

    Runs one forward and backward. Weights and gradients stay as they were; batch-norm's running statistics change.
    `bucketed`: under DistributedDataParallel without gradient_as_bucket_view.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trainable = _bytes_of(parameters)
    backward = _Watch(model, inputs, targets).run(loss)
    copies = 2 if optimizer.name != "sgd" else 1 if optimizer.momentum else 0
    inputs_and_targets = round(growth * _bytes_of((inputs, targets)))
    standing = _bytes_of([*model.parameters(), *model.buffers()]) + copies * trainable + inputs_and_targets
    in_update = trainable + min(_in_passing(optimizer, parameters), 2 * trainable)
    return standing + (trainable if bucketed else 0) + max(backward.highest(growth), in_update)


def _in_passing(optimizer: Optimizer, parameters: Sequence[Tensor]) -> int:
    """Bytes of the optimizer's temporary tensors (torch/optim/{sgd,adam}.py).

    foreach on CUDA makes them for all parameters at once, the loop for one parameter after the other.
    """
    chosen = implementation(optimizer, parameters)
    if chosen == "fused" or not parameters:
        return 0
    adam = optimizer.name != "sgd"
    if not adam and not optimizer.nesterov and not optimizer.weight_decay:
        return 0
    if chosen == "foreach":
        return _bytes_of(parameters)
    return (2 if adam else 1) * max(_bytes_of([parameter]) for parameter in parameters)


class _Watch:
    def __init__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        self.model, self.inputs, self.targets = model, inputs, targets
        standing = [*model.parameters(), *model.buffers(), inputs, targets]
        self.standing = {tensor.untyped_storage().data_ptr() for tensor in standing}
        self.device = standing[0].device
        self.saved: dict[int, int] = {}
        """Bytes by the storage's address; addresses are unique as long as the graph holds all storages."""
        self.events: list[tuple[int, int]] = []
        """(storage used, 0) or (0, bytes of gradient made), in the order of backward."""

    def run(self, loss: Loss) -> Backward:
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        handles = [parameter.register_post_accumulate_grad_hook(self._made) for parameter in trainable]
        before = [parameter.grad for parameter in self.model.parameters()]
        self.model.zero_grad(set_to_none=True)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._keep, self._use):
                value = loss(self.model(self.inputs), self.targets)
            kept = dict(self.saved)
            value.backward()
        finally:
            for handle in handles:
                handle.remove()
            for parameter, gradient in zip(self.model.parameters(), before, strict=True):
                parameter.grad = gradient
        return Backward(
            activations=sum(kept.values()),
            # oneDNN keeps weights, and makes their gradients, in a memory format of its own, which takes copies.
            copies=2 if self.device.type == "cpu" else 0,
            history=tuple(self._history(kept)),
        )

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

    def _history(self, kept: dict[int, int]) -> list[BackwardEvent]:
        last_use = {storage: number for number, (storage, _) in enumerate(self.events) if storage in kept}
        return [
            BackwardEvent(
                used=kept.get(storage, 0),
                freed=kept[storage] if last_use.get(storage) == number else 0,
                gradient=gradient,
            )
            for number, (storage, gradient) in enumerate(self.events)
        ]


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes of the memory that these tensors lie in, each once."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())
