"""A strategy for Lightning's Trainer that trains to the same bits on every number of ranks.

It takes the place of DDPStrategy, makes processes and the process group as that does, but leaves the module without
DistributedDataParallel, deals whole micro-batches to the ranks, and sums gradients in the canonical tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from ddp_core.base.errors import UserError

from . import imports_of
from .dealing import accumulation_steps, deal
from .micro_steps import MicroSteps

with imports_of("lightning", "lightning"):
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import DDPStrategy
    from torchmetrics import Metric

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
        self._steps.can_repeat(self._repeated)

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
        steps.begin((arguments, named))
        output = super().training_step(*arguments, **named)
        self._loss = _loss_in(output)
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *arguments: Any, **named: Any) -> Tensor:
        """Run backward from the loss that `training_step` returned.

        Lightning has divided `closure_loss` by `accumulate_grad_batches`, which depends on the number of ranks.
        """
        assert self._loss is not None
        with self._exact_steps().backward(scale=1 / self._micro_batches) as done:
            loss: Tensor = super().backward(self._loss, optimizer, *arguments, **named)
            done(self._loss)
        self._loss = None
        return loss

    def _repeated(self, kept: tuple[tuple[Any, ...], dict[str, Any]]) -> Tensor:
        """Run forward and backward of a micro-batch again, of which neither the logs nor metrics learn."""
        arguments, named = kept
        with _unlogged(self.lightning_module):
            loss: Tensor = _loss_in(super().training_step(*arguments, **named))
            super().backward(loss, self.optimizers[0])
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

    def save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        """Save, unless the ranks have other weights."""
        if self._steps is not None:
            self._steps.require_same_weights()
        super().save_checkpoint(*arguments, **named)

    def on_train_end(self) -> None:
        """Compare what the ranks have ended with."""
        self._exact_steps().require_same_weights()
        super().on_train_end()

    def teardown(self) -> None:
        """End the exact reduction, then what DDPStrategy ends."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        super().teardown()

    def _exact_steps(self) -> MicroSteps:
        assert self._steps is not None
        return self._steps


def _loss_in(output: Any) -> Any:
    return output["loss"] if isinstance(output, Mapping) else output


@contextmanager
def _unlogged(module: LightningModule) -> Iterator[None]:
    """After this block no log has a value more, and metrics (torchmetrics') have the states that they had before."""
    modules = [layer for layer in module.modules() if isinstance(layer, LightningModule)]
    metrics = [(layer, layer.clone()) for layer in module.modules() if isinstance(layer, Metric)]
    for layer in modules:
        layer.__dict__.update(log=_nothing, log_dict=_nothing)
    try:
        yield
    finally:
        for layer in modules:
            del layer.__dict__["log"], layer.__dict__["log_dict"]
        for metric, before in metrics:
            states = {name: value for name, value in before.__dict__.items() if not callable(value)}
            metric.__dict__.update({name: states[name] for name in states.keys() - {"_modules", "_parameters"}})


def _nothing(*_: Any, **__: Any) -> None:
    pass
