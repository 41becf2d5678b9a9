"""Forward and backward passes of the experiment's model, in the experiment's precision.

Only this file calls the model and its loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from ddp_core.base.user_code import user_code
from ddp_core.config.experiment import Experiment
from ddp_core.data.trees import Tree, map_tensors
from ddp_core.model.builders import laid_out
from ddp_core.model.losses import Loss

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def call(module: nn.Module, inputs: Tree) -> Tree:
    """What the module returns for a tensor, for a tuple or list of arguments, or for a dict of named arguments."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)


class Passes:
    """Computes outputs, losses and gradients of micro-batches; `module` is the model, or what wraps it."""

    def __init__(self, experiment: Experiment, loss: Loss, device: torch.device) -> None:
        self._loss, self._device = loss, device
        self._precision = _PRECISIONS.get(experiment.precision)
        self.scaler = torch.amp.GradScaler(device.type) if self._precision is torch.float16 else None
        self._memory_format = experiment.memory_format
        self._loss_weights: dict[int, Tensor] = {}

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
            return outputs, targets, self._loss(outputs, targets)

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """While in the block, this thread's forwards run in the experiment's precision."""
        if self._precision is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._precision)

    def loss(self, module: nn.Module, inputs: Tree, targets: Tree) -> Tensor:
        """The loss of one micro-batch from the loader, summed over its samples."""
        return self.outputs_and_loss(module, inputs, targets)[2]

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        """Add the gradient of a micro-batch's loss, times its `loss_weight`, to every `.grad`."""
        with user_code("your model's backward"):
            loss.backward(weight)

    def loss_weight(self, samples: int, copies: int = 1) -> Tensor:
        """The factor of a summed loss in backward, 1 / `samples`: gradients are then of the mean over the global batch.

        A scalar tensor on the model's device, in fp16 multiplied by the scaler's scale. Where the all-reduce divides
        by the number of ranks, `copies` is that number.
        """
        if samples not in self._loss_weights:
            self._loss_weights[samples] = torch.tensor(copies / samples, device=self._device)
        weight = self._loss_weights[samples]
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
