"""A strategy for Lightning Fabric that trains to the same bits on every number of ranks.

As ExactStrategy for the Trainer, it takes the place of DDPStrategy; the loop is the user's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ddp_core.base.errors import UserError

from . import imports_of
from .dealing import accumulation_steps, deal
from .micro_steps import MicroSteps

with imports_of("fabric", "lightning"):
    from lightning.fabric.strategies import DDPStrategy

__all__ = ["ExactFabricStrategy"]


class ExactFabricStrategy(DDPStrategy):  # type: ignore[misc]
    """`Fabric(strategy=ExactFabricStrategy(micro_batches=12), …)`: 12 micro-batches make a step, on any ranks.

    Call `fabric.backward` with the mean loss of each micro-batch, never divided, and update where `steps.whole`. `seed`
    keys dropout, from the model's forward on, and the order of the samples. Loaders that are set up are dealt anew
    (`deal`), one module is set up for training. Further arguments are DDPStrategy's. Raises UserError for an update in
    the middle of a step.
    """

    def __init__(self, micro_batches: int, seed: int = 0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._micro_batches, self._seed = micro_batches, seed
        self._backward_sync_control = _NothingToHoldBack()
        self._exact_steps: MicroSteps | None = None

    @property
    def steps(self) -> MicroSteps:
        """How many steps are done, whether one is whole, and the state for a checkpoint.

        Raises UserError before `fabric.setup`.
        """
        if self._exact_steps is None:
            raise UserError("no module has been set up: model, optimizer = fabric.setup(model, optimizer)")
        return self._exact_steps

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Take the exact reduction in place of DistributedDataParallel."""
        if self._exact_steps is not None:
            raise UserError("ExactFabricStrategy trains one module: put its parts into one, and set that up")
        accumulation_steps(self._micro_batches, self.world_size)
        steps = self._exact_steps = MicroSteps(module, self._micro_batches, self._seed, self.root_device)

        def begin(module: nn.Module, _: object) -> None:
            if module.training and torch.is_grad_enabled():
                steps.begin()

        module.register_forward_pre_hook(begin)
        return module

    def process_dataloader(self, dataloader: DataLoader[Any]) -> DataLoader[Any]:
        """Deal the loader's samples."""
        return deal(
            dataloader,
            self._micro_batches,
            self._seed,
            self.global_rank,
            self.world_size,
            # The module may be set up later, and a loader that is read without one trains nothing.
            lambda: self._exact_steps is not None and self._exact_steps.is_training,
        )

    def backward(self, tensor: Tensor, module: nn.Module | None, *arguments: Any, **named: Any) -> None:
        """Run backward; after the last micro-batch of a step the gradients are complete."""
        with self.steps.backward(scale=1 / self._micro_batches):
            super().backward(tensor, module, *arguments, **named)

    def optimizer_step(self, optimizer: Any, **named: Any) -> Any:
        """Update the weights, unless the step is not whole."""
        self.steps.require_whole("an update")
        return super().optimizer_step(optimizer, **named)

    def save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        """Save, unless the ranks have other weights."""
        self.steps.require_same_weights()
        super().save_checkpoint(*arguments, **named)


class _NothingToHoldBack:
    """What `fabric.no_backward_sync` calls; there is nothing to hold back, so it does nothing."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()
