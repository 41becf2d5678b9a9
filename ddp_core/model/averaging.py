"""The exponential moving average of a model's weights, with torch's own AveragedModel."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class WeightAverage(AveragedModel):
    """A copy of a model whose weights are decay * average + (1 - decay) * weights after each `update_parameters`.

    The first update copies. Buffers, such as batch-norm statistics, are averaged as the weights are, but for buffers of
    whole numbers, which averaging would cut off, and of infinities (attention masks), which it would turn into NaN:
    these are copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
        self._copied = [
            number
            for number, buffer in enumerate(model.buffers())
            if not (buffer.is_floating_point() and bool(buffer.isfinite().all()))
        ]

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Average with the model's weights as they are now."""
        super().update_parameters(model)
        if self._copied:
            ours, theirs = list(self.module.buffers()), list(model.buffers())
            for number in self._copied:
                ours[number].copy_(theirs[number])
