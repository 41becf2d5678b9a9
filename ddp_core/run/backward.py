"""One forward and backward, watched: what forward keeps, when backward frees it, and when it makes the gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ddp_core.data.trees import Tree, call, tensors_of
from ddp_core.model.losses import Loss


class BackwardEvent(NamedTuple):
    """One event of backward, in bytes: a saved tensor is used, and freed if not used again, or a gradient is made."""

    used: int = 0
    freed: int = 0
    gradient: int = 0


class Leaving(NamedTuple):
    """Gradients that are sent in groups, and freed, before the backward that makes them ends."""

    group: int = 0
    """Bytes of the largest group."""
    under_way: float = 1
    """What a group takes while it is sent, as a multiple of its size."""
    stays: float = 0
    """By how much the sums that this rank keeps grow with a group, as a multiple of the group's size."""


@dataclass(frozen=True)
class Backward:
    """What forward and backward of the watched micro-batch took."""

    activations: int
    """Bytes that forward keeps for backward; they grow with the batch, gradients do not."""
    gradients: int
    """Bytes of all gradients."""
    copies: int
    """How many more copies of a gradient there are while it is made."""
    history: tuple[BackwardEvent, ...]
    adds_early: bool = False
    """Whether a gradient is added to earlier sums as soon as it is made, where ranks keep a part of it."""

    def highest(self, growth: float, sums: int = 0, leaving: Leaving | None = None, added: int = 0) -> int:
        """The most bytes at a time, of what does not live from step to step, in a batch `growth` times as large.

        `sums` is the number of sums of earlier micro-batches, each as large as all gradients; `added` of them are added
        to a gradient as soon as it is made. Where gradients are sent in groups, each sum's part for a group goes along.
        """
        alive, made, gone, under_way, highest = growth * self.activations, 0, 0, 0.0, 0.0
        for event in self.history:
            # During a layer's backward: the gradients of its output and of its input, each about as large as what it
            # kept.
            flying = 2 * growth * event.used + self.copies * event.gradient
            made += event.gradient
            stays = 0.0
            if leaving is not None:
                if made >= leaving.group:
                    under_way, gone, made = leaving.under_way * (1 + sums - added) * made, gone + made, 0
                stays = leaving.stays * gone
            kept = (1 - added) * made + under_way + stays + sums * (self.gradients - gone)
            highest = max(highest, alive + flying + kept)
            alive -= growth * event.freed
        return round(highest)


def watch(model: nn.Module, loss: Loss, inputs: Tree, targets: Tree) -> Backward:
    """Run one forward and backward; weights and gradients stay as they were, batch-norm's running statistics change."""
    return _Watch(model, inputs, targets).run(loss)


class _Watch:
    def __init__(self, model: nn.Module, inputs: Tree, targets: Tree) -> None:
        self.model, self.inputs, self.targets = model, inputs, targets
        standing = [*model.parameters(), *model.buffers(), *tensors_of((inputs, targets))]
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
                value = loss(call(self.model, self.inputs), self.targets)
            kept = dict(self.saved)
            value.backward()
        finally:
            for handle in handles:
                handle.remove()
            for parameter, gradient in zip(self.model.parameters(), before, strict=True):
                parameter.grad = gradient
        return Backward(
            activations=sum(kept.values()),
            gradients=bytes_of(trainable),
            # oneDNN keeps weights, and makes their gradients, in a memory format of its own, which takes copies.
            copies=2 if self.device.type == "cpu" else 0,
            history=tuple(self._history(kept)),
            adds_early=self.device.type == "cpu",
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


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes of the memory that these tensors lie in, each once."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())
