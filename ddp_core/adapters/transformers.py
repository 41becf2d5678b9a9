"""A Hugging Face Trainer that trains to the same bits on every number of ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Sampler

from ddp_core.base.errors import UserError

from . import imports_of
from .dealing import WholeSteps, accumulation_steps, keyed_in_place
from .micro_steps import MicroSteps

with imports_of("transformers", "transformers"):
    from transformers import Trainer

__all__ = ["ExactTrainer"]


class ExactTrainer(Trainer):  # type: ignore[misc]
    """`ExactTrainer(model=…, args=…, train_dataset=…, micro_batches=12)`: 12 micro-batches make a step, on any ranks.

    A micro-batch has `per_device_train_batch_size` samples. The number of ranks must divide `micro_batches`;
    `gradient_accumulation_steps` follows from it. `args.seed` keys dropout, and `args.data_seed` (else `args.seed`) the
    order of the samples; those that fill no whole step are left out. A Trainer of your own becomes exact as
    `class Mine(ExactTrainer, MyTrainer)`. Raises UserError for options with which the result depends on the ranks.
    """

    loss_is_scaled_for_ga = True  # keeps the Trainer from dividing a loss by the accumulation steps of a rank

    def __init__(self, *arguments: Any, micro_batches: int, **named: Any) -> None:
        super().__init__(*arguments, **named)
        args = self.args
        if args.n_gpu > 1:
            raise UserError("one process per GPU is needed: start the script with torchrun, or let it see one GPU")
        if not args.average_tokens_across_devices:
            raise UserError("average_tokens_across_devices=False weights tokens by rank: leave it True")
        if args.train_sampling_strategy not in ("random", "sequential"):
            raise UserError(
                f"train_sampling_strategy={args.train_sampling_strategy} is not dealt the same way on every layout"
            )
        args.gradient_accumulation_steps = accumulation_steps(micro_batches, args.world_size)
        self._micro_batches = micro_batches
        self._steps: MicroSteps | None = None
        # A model that is prepared as for evaluation stays without DistributedDataParallel.
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
        self._prepare_loader = self.accelerator.prepare_data_loader
        self.accelerator.prepare_data_loader = self._prepare_keyed

    def _prepare_keyed(self, loader: Any, *arguments: Any, **named: Any) -> Any:
        """Prepare a loader as Accelerate does; what the training loader draws follows from the micro-batch."""
        sampler = getattr(loader, "sampler", None)
        keyed = keyed_in_place(loader, self._data_seed) if isinstance(sampler, WholeSteps) else loader
        return self._prepare_loader(keyed, *arguments, **named)

    @property
    def _data_seed(self) -> int:
        args = self.args
        return int(args.seed if args.data_seed is None else args.data_seed)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        """The order of the samples. Accelerate deals batches of it to the ranks in turn."""
        args = self.args
        samples = self._micro_batches * args.per_device_train_batch_size
        shuffle = args.train_sampling_strategy == "random"
        return WholeSteps(
            self.train_dataset if train_dataset is None else train_dataset, samples, self._data_seed, shuffle
        )

    def train(self, *arguments: Any, **named: Any) -> Any:
        """Train as the Trainer does, then end the exact reduction."""
        try:
            result = super().train(*arguments, **named)
            if self._steps is not None:
                self._steps.require_same_weights()
            return result
        finally:
            if self._steps is not None:
                self._steps.close()
                self._steps = None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run one micro-batch; after the last one of a step the gradients are complete."""
        args = self.args
        if self._steps is None:
            self._steps = MicroSteps(model, self._micro_batches, args.seed, args.device)
            self._steps.can_repeat(lambda kept: super(ExactTrainer, self).training_step(model, *kept))
        self._steps.step = self.state.global_step
        self._steps.begin((inputs, num_items_in_batch))
        # Where the number of items is known, the Trainer has the loss divided by that of all micro-batches together.
        divided = num_items_in_batch is not None and (
            self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        )
        scale = 1.0 if divided else 1 / self._micro_batches
        # If True, the Trainer would multiply the loss by the number of ranks, by which DistributedDataParallel divides.
        args.average_tokens_across_devices = False
        try:
            with self._steps.backward(scale) as done:
                loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
                done(loss)
        finally:
            args.average_tokens_across_devices = True
        if self.accelerator.sync_gradients:
            self._steps.require_whole("the epoch ends")
        # The log takes the mean over the ranks.
        logged: Tensor = loss * (scale * args.world_size)
        return logged
