"""What a step does with the experiment's own code: forward and backward passes, and the update of the weights.

Only this file calls the model in training, its loss, the optimizer and the schedule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.base.torch_internals import backward_from
from ddp_core.base.trees import Tree, call, map_tensors
from ddp_core.base.user_code import user_code
from ddp_core.config.experiment import Experiment, Schedule, called
from ddp_core.model.builders import laid_out
from ddp_core.model.losses import Loss
from ddp_core.trainers.train_state import TrainState

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def require_scalable(model: nn.Module) -> None:
    """Raise UserError (2) where torch's GradScaler, which fp16 needs, cannot scale a gradient of the model."""
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise UserError(
                f"precision fp16: {name} is complex, and torch scales no complex gradients; use --set precision=bf16 "
                "or fp32, or keep its real and imaginary part in two parameters"
            )


def _summed_loss(loss: Any, name: str) -> Tensor:
    """The loss that the function `name` returned. Raises UserError where that is no single number in a tensor."""
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise UserError(
        f"{called('loss', name)} returned {what}; let it return one number as a tensor of shape [], the sum over the "
        "samples, for example by reduction='sum' or .sum()"
    )


class Passes:
    """Computes outputs, losses and gradients of micro-batches, in the experiment's precision.

    `module` is the model, or what wraps it.
    """

    def __init__(self, experiment: Experiment, loss: Loss, device: torch.device) -> None:
        self._loss, self._loss_name, self._device = loss, experiment.loss, device
        self._precision = _PRECISIONS.get(experiment.precision)
        self.scaler = torch.amp.GradScaler(device.type) if self._precision is torch.float16 else None
        self.autocast: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """Makes a context in which the forwards of this thread run in the experiment's precision."""
        if self._precision is not None:
            # torch keeps one cache of cast weights for all threads, and a thread of --layout dp that leaves its context
            # empties it: the gradient of a weight that a forward uses twice would depend on when that happens.
            self.autocast = partial(torch.autocast, device.type, self._precision, cache_enabled=False)
        self._memory_format = experiment.memory_format

    def outputs_and_loss(self, module: nn.Module, inputs: Tree, targets: Tree) -> tuple[Tree, Tree, Tensor]:
        """Outputs (float32 in mixed precision, too), targets and summed loss of a batch from the loader.

        All three are on the model's device. Inputs, outputs and targets are trees of tensors.
        """
        if self._device.type != "cpu":
            bring = methodcaller("to", self._device, non_blocking=True)
            inputs, targets = map_tensors(bring, (inputs, targets))
        if self._memory_format != "contiguous":
            inputs = map_tensors(partial(laid_out, memory_format=self._memory_format), inputs)
        with user_code("your model"), self.autocast():
            outputs = call(module, inputs)
        if self._precision is not None:
            outputs = map_tensors(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, outputs)
        with user_code("your loss"):
            try:
                loss = self._loss(outputs, targets)
            except Exception as error:
                from ddp_core.trainers.torch_errors import note_labels

                note_labels(error, outputs, targets)
                raise
        return outputs, targets, _summed_loss(loss, self._loss_name)

    def loss(self, module: nn.Module, inputs: Tree, targets: Tree) -> Tensor:
        """The loss of one micro-batch from the loader, summed over its samples."""
        loss = self.outputs_and_loss(module, inputs, targets)[2]
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise UserError(
                f"{called('loss', self._loss_name)} has no gradient, because nothing that is trained leads to it: look "
                "for .detach(), .item(), .numpy(), argmax, a comparison or torch.no_grad() in your model and your loss"
            )
        return loss

    def forget(self) -> None:
        """Keep nothing of what was computed with memory that is not used any more; does nothing by default."""

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        """Add the gradient of a micro-batch's loss, times its `loss_weight`, to every `.grad`."""
        with user_code("your model's backward"):
            backward_from(loss, weight)

    def loss_weight(self, divisor: int, copies: int = 1) -> Tensor:
        """The factor of a summed loss in backward, 1 / `divisor`: gradients are then of the mean over the global batch.

        A scalar tensor on the model's device, in fp16 multiplied by the scaler's scale. Where the all-reduce divides
        by the number of ranks, `copies` is that number.
        """
        # Filled on the device: a copy from the host would wait until the device is done, in each step.
        weight = torch.full((), copies / divisor, device=self._device)
        return weight if self.scaler is None else self.scaler.scale(weight)


class InPrecision(nn.Module):
    """A module whose forward enters the experiment's precision by itself.

    nn.DataParallel's threads inherit that autocast is on, but not its dtype: bf16 would become fp16 there.
    """

    def __init__(self, module: nn.Module, passes: Passes) -> None:
        super().__init__()
        self.module, self._passes = module, passes

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the module returns."""
        with self._passes.autocast():
            return self.module(*inputs, **named)


class WeightUpdate:
    """Updates the weights of a state from the gradients in `.grad`.

    `clip(max_norm)` limits the norm of the gradients. From the step on where `held_back`, a number on the device, is 1,
    the optimizer updates nothing (see `LossGate`), and no average moves.

    A built-in schedule sets each parameter group's rate, from the rate that the group was made with. A schedule of the
    experiment's own takes a step after each update, but not where the update was skipped.
    """

    def __init__(
        self,
        experiment: Experiment,
        state: TrainState,
        steps_per_epoch: int,
        clip: Callable[[float], object],
        held_back: Tensor | None = None,
    ) -> None:
        self._held_back = held_back
        self._state, self._clip_norm = state, experiment.clip_norm
        self._clip = clip
        self._rule = experiment.schedule if isinstance(experiment.schedule, Schedule) else None
        self._steps = (steps_per_epoch, experiment.total_steps(steps_per_epoch))
        self._has_stepped = self._is_saveable = False
        groups = state.optimizer.param_groups
        self._base_rates = [float(group["lr"]) for group in groups]
        state.learning_rate = self._base_rates[0]

    def make(self, step: int) -> None:
        """Make the update of `step`, counted from 0 over the whole run."""
        state = self._state
        groups = state.optimizer.param_groups
        if self._rule is not None:
            for group, base in zip(groups, self._base_rates, strict=True):
                group["lr"] = self._rule.rate(base, step, *self._steps)
        state.learning_rate = float(groups[0]["lr"])
        if state.scaler is not None:
            state.scaler.unscale_(state.optimizer)
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        with user_code("your optimizer"):
            if state.scaler is None:
                state.optimizer.step()
            elif not self._step_scaled(state.scaler):
                return
        if not self._is_saveable:
            # Most of an optimizer's state is made by its first update.
            state.require_saveable(of_all_ranks=True)
            self._is_saveable = True
        if state.schedule is not None:
            with user_code("your schedule"):
                state.schedule.step()
        if state.average is not None:
            state.average.update_parameters(state.model, self._held_back)

    def _step_scaled(self, scaler: torch.amp.GradScaler) -> bool:
        """Step with scaled gradients, unless one of them overflowed; returns whether the weights were updated."""
        state = self._state
        if self._has_stepped and state.schedule is None and state.average is None:
            # Nothing depends on the answer, and on CUDA reading the scale makes the host wait for the device.
            scaler.step(state.optimizer)
            scaler.update()
            return True
        before, is_fresh = scaler.get_scale(), not state.optimizer.state
        scaler.step(state.optimizer)
        scaler.update()
        made = scaler.get_scale() >= before
        self._has_stepped = self._has_stepped or made
        if is_fresh and not made:
            # torch's fused SGD has made momentum buffers that it expects its first update to fill, which was skipped
            # (torch/optim/sgd.py: empty_like). Without them the next update is the first one again.
            state.optimizer.state.clear()
        return made
