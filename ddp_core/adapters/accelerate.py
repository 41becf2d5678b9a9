"""An Accelerator that trains to the same bits on every number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ddp_core.base.errors import UserError

from . import imports_of
from .dealing import accumulation_steps, keyed_in_place
from .micro_steps import MicroSteps

with imports_of("accelerate", "accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, DistributedType

__all__ = ["ExactAccelerator"]

_EXACT = {"split_batches": False, "dispatch_batches": None, "even_batches": False, "use_seedable_sampler": True}
"""How batches must be dealt: whole ones in turn, none twice, in an order that every rank computes by itself."""


class ExactAccelerator(Accelerator):  # type: ignore[misc]
    """`ExactAccelerator(micro_batches=12)`: 12 batches of the training loader make a step, on any number of ranks.

    The number of ranks must divide `micro_batches`; `gradient_accumulation_steps` follows from it. `seed` keys dropout
    and the order of a loader that shuffles. Write each micro-batch as `with accelerator.accumulate(model):` with one
    `accelerator.backward` of its mean loss. A prepared scheduler goes on by one step per update. One model is prepared
    for training, and left without DistributedDataParallel. Further arguments are Accelerator's. Raises UserError for
    another kind of parallelism, for a way to deal batches that depends on the ranks, and where an epoch ends in the
    middle of a step.
    """

    def __init__(self, micro_batches: int, seed: int = 0, **arguments: Any) -> None:
        arguments.setdefault("dataloader_config", DataLoaderConfiguration(data_seed=seed, **_EXACT))
        super().__init__(**arguments)
        if self.distributed_type not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
            raise UserError(f"ExactAccelerator is for data parallelism, not for {self.distributed_type}")
        for name, needed in _EXACT.items():
            if (given := getattr(self.dataloader_config, name)) != needed:
                raise UserError(f"{name}={given} deals samples in a way that depends on the ranks: use {needed}")
        self.gradient_accumulation_steps = accumulation_steps(micro_batches, self.num_processes)
        self._micro_batches, self._seed = micro_batches, seed
        self._exact_steps: MicroSteps | None = None

    @property
    def steps(self) -> MicroSteps:
        """How many steps are done, and whether one is whole. Raises UserError before `prepare`."""
        if self._exact_steps is None:
            raise UserError(
                "no model has been prepared: model, optimizer, … = accelerator.prepare(model, optimizer, …)"
            )
        return self._exact_steps

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare the model as for evaluation, which leaves DistributedDataParallel out, and for exact steps."""
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        if not evaluation_mode:
            if self._exact_steps is not None:
                raise UserError("ExactAccelerator trains one model: put its parts into one module, and prepare that")
            self._exact_steps = MicroSteps(prepared, self._micro_batches, self._seed, self.device)
            self.register_for_checkpointing(self._exact_steps)
        return prepared

    def prepare_data_loader(self, data_loader: Any, *arguments: Any, **named: Any) -> Any:
        """Prepare a loader whose batches are those of all ranks together; each rank then takes its own."""
        sampler = getattr(data_loader, "sampler", None)
        if (replicas := getattr(sampler, "num_replicas", 1)) > 1:
            raise UserError(
                f"{type(sampler).__name__} deals samples to {replicas} ranks, and Accelerate would deal these "
                "once more, so that most are never trained: give it num_replicas=1, rank=0"
            )
        # The model may be prepared later, and a loader that is read without one trains nothing.
        return super().prepare_data_loader(
            keyed_in_place(
                data_loader, self._seed, lambda: self._exact_steps is not None and self._exact_steps.is_training
            ),
            *arguments,
            **named,
        )

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler that takes one step per update; Accelerate's takes one for each rank."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True
        return prepared

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Run one micro-batch."""
        self.steps.begin()
        with super().accumulate(*models):
            yield

    def backward(self, loss: Tensor, **arguments: Any) -> None:
        """Run backward from the micro-batch's mean loss; after the last micro-batch the gradients are complete.

        Accelerate would divide the loss by `gradient_accumulation_steps`, which depends on the number of ranks.
        """
        scaled = self.scaler.scale(loss) if self.scaler is not None else loss
        with self.steps.backward(scale=1 / self._micro_batches):
            scaled.backward(**arguments)
        if self.sync_gradients:
            self.steps.require_whole("the epoch ends, or an update comes,")

    def save_state(self, *arguments: Any, **named: Any) -> Any:
        """Save, unless in the middle of a step."""
        self.steps.require_whole("a checkpoint")
        self.steps.require_same_weights()
        return super().save_state(*arguments, **named)

    def load_state(self, *arguments: Any, **named: Any) -> None:
        """Load what any number of ranks has saved."""
        super().load_state(*arguments, **named)
        self.step = 0  # Accelerate's count of micro-batches, by which it knows the last one of a step

    def end_training(self) -> None:
        """End the exact reduction, then what Accelerate ends."""
        if self._exact_steps is not None:
            self._exact_steps.close()
            self._exact_steps = None
        super().end_training()
