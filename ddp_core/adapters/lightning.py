"""A strategy for Lightning's Trainer that trains to the same bits on every number of ranks.

It takes the place of DDPStrategy, makes processes and the process group as that does, but leaves the module without
DistributedDataParallel, deals whole micro-batches to the ranks, and sums gradients in the canonical tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from ddp_core.base.errors import UserError

from . import imports_of
from .dealing import accumulation_steps, deal
from .micro_steps import MicroSteps

with imports_of("lightning", "lightning"):
    from lightning.pytorch.strategies import DDPStrategy

__all__ = ["ExactStrategy"]


class ExactStrategy(DDPStrategy):  # type: ignore[misc]
    """`Trainer(strategy=ExactStrategy(micro_batches=12), …)`: 12 batches of the loader make a step, on any ranks.

    The number of ranks must divide `micro_batches`; `accumulate_grad_batches` follows from it. `seed` keys
    dropout and the order of the samples. `training_step` returns the mean loss of its batch. The training loader's
    batch size is that of a micro-batch; its samples are dealt anew, and those that fill no whole step are left out.
    Further arguments are DDPStrategy's. Raises UserError for manual optimization, for validation in the middle of a
    step, and for a sampler of your own.
    """

    def __init__(self, micro_batches: int, seed: int = 0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._micro_batches, self._seed = micro_batches, seed
        self._steps: MicroSteps | None = None
        self._loss: Tensor | None = None

    def setup(self, trainer: Any) -> None:
        """Derive `accumulate_grad_batches`, and set everything up as DDPStrategy does."""
        if not self.lightning_module.automatic_optimization:
            raise UserError("ExactStrategy needs automatic_optimization: with manual optimization, use Fabric")
        derived = accumulation_steps(self._micro_batches, self.world_size)
        if trainer.accumulate_grad_batches not in (1, derived):
            raise UserError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches}, but {self._micro_batches} micro-batches "
                f"on {self.world_size} ranks make {derived}: leave it out"
            )
        trainer.accumulate_grad_batches = derived
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Take the exact reduction in place of DistributedDataParallel."""
        self._steps = MicroSteps(self.model, self._micro_batches, self._seed, self.root_device)

    def process_dataloader(self, dataloader: object) -> object:
        """Deal the samples of the training loader; leave the others alone."""
        if not self.lightning_module.trainer.training:
            return dataloader
        if not isinstance(dataloader, DataLoader):
            raise UserError(f"ExactStrategy trains from one torch DataLoader, not from {type(dataloader).__name__}")
        return deal(dataloader, self._micro_batches, self._seed, self.global_rank, self.world_size)

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        """Run a micro-batch's forward with its own random numbers."""
        steps = self._exact_steps()
        steps.step = self.lightning_module.trainer.global_step
        steps.begin()
        output = super().training_step(*arguments, **named)
        self._loss = output["loss"] if isinstance(output, Mapping) else output
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *arguments: Any, **named: Any) -> Tensor:
        """Run backward from the loss that `training_step` returned.

        Lightning has divided `closure_loss` by `accumulate_grad_batches`, which depends on the number of ranks.
        """
        assert self._loss is not None
        with self._exact_steps().backward(scale=1 / self._micro_batches):
            loss: Tensor = super().backward(self._loss, optimizer, *arguments, **named)
        self._loss = None
        return loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **named: Any) -> Any:
        """Update the weights, unless the step is not whole."""

        def whole() -> Any:
            result = closure()
            self._exact_steps().require_whole("an update")
            return result

        return super().optimizer_step(optimizer, whole, model, **named)

    def validation_step(self, *arguments: Any, **named: Any) -> Any:
        """Validate, unless in the middle of a step, where batch-norm layers hold the statistics of one micro-batch."""
        if self._steps is not None:
            self._steps.require_whole("validation")
        return super().validation_step(*arguments, **named)

    def teardown(self) -> None:
        """End the exact reduction, then what DDPStrategy ends."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        super().teardown()

    def _exact_steps(self) -> MicroSteps:
        assert self._steps is not None
        return self._steps
