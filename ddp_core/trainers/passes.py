"""Forward and backward passes of the experiment's model, in the experiment's precision.

Every call of the model and its loss is made in this file: an exception that comes from below it is the experiment's
(ddp_core/run/blame.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddp_core.model.losses import Loss
from ddp_core.spec.experiment import Experiment

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Passes:
    """Outputs, losses and gradients of micro-batches, for any module that wraps the model."""

    def __init__(self, experiment: Experiment, loss: Loss, device: torch.device, exact: bool) -> None:
        self._loss, self._device = loss, device
        self._precision = _PRECISIONS.get(experiment.precision)
        # torch's 2**16 is meant for a mean; the exact backward starts from a sum over samples.
        scale = 2.0 ** (16 - (experiment.global_batch_size.bit_length() if exact else 0))
        self.scaler = torch.amp.GradScaler(device.type, scale) if self._precision is torch.float16 else None
        self._loss_weights: dict[int, Tensor] = {}

    def outputs_and_loss(self, module: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A batch from the loader: its outputs (float32 in mixed precision, too), its targets, and its summed loss.

        All three are on the model's device.
        """
        if self._device.type == "cuda":
            inputs, targets = inputs.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)
        if self._precision is None:
            outputs = module(inputs)
        else:
            with torch.autocast(self._device.type, self._precision):
                outputs = module(inputs)
            outputs = outputs.float()
        return outputs, targets, self._loss(outputs, targets)

    def loss(self, module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of one micro-batch from the loader, summed over its samples."""
        return self.outputs_and_loss(module, inputs, targets)[2]

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        """Add the gradient of a micro-batch's loss, times its `loss_weight`, to every `.grad`."""
        loss.backward(weight)

    def loss_weight(self, samples: int, copies: int = 1) -> Tensor:
        """What backward starts from: the weight of one sample in the mean over a global batch of `samples`.

        `copies` undoes a division by the number of ranks.
        """
        if samples not in self._loss_weights:
            self._loss_weights[samples] = torch.tensor(copies / samples, device=self._device)
        weight = self._loss_weights[samples]
        return weight if self.scaler is None else self.scaler.scale(weight)
