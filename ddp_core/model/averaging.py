"""The exponential moving average of a model's weights, with torch's own AveragedModel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ddp_core.base.torch_internals import foreach_copy_


class WeightAverage(AveragedModel):
    """A copy of a model whose weights are decay * average + (1 - decay) * weights after each `update_parameters`.

    The first update copies the weights. Buffers of real numbers, such as batch-norm statistics, are averaged like them.
    Copied instead are parameters and buffers of whole numbers, whose average would lose its fraction, and buffers with
    infinities (attention masks), whose average would be NaN.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, use_buffers=True)
        self._move = get_ema_multi_avg_fn(decay)
        self._is_averaged = [
            parameter.is_floating_point() or parameter.is_complex() for parameter in model.parameters()
        ]
        self._is_averaged += [
            buffer.is_floating_point() and bool(buffer.isfinite().all()) for buffer in model.buffers()
        ]

    @torch.no_grad()
    def update_parameters(self, model: nn.Module, held_back: Tensor | None = None) -> None:
        """Average with the model's weights as they are now, unless `held_back` is 1: a number on the weights' device.

        This overrides AveragedModel's own method, which copies its counter to the device at each step, for the sake of
        other kinds of average, and makes the host wait for that.
        """
        averages, current = ([*each.parameters(), *each.buffers()] for each in (self.module, model))
        if held_back is not None:
            # The average of a number and itself is that number, so the host need not know.
            stays = held_back.bool()
            current = [torch.where(stays, ours, theirs) for ours, theirs in zip(averages, current, strict=True)]
        pairs = list(zip(averages, current, self._is_averaged, strict=True))
        is_first = int(self.n_averaged) == 0  # on the CPU, wherever the model is
        averaged = [] if is_first else [(ours, theirs) for ours, theirs, is_averaged in pairs if is_averaged]
        copied = [(ours, theirs) for ours, theirs, is_averaged in pairs if is_first or not is_averaged]
        if averaged:
            self._move([ours for ours, _ in averaged], [theirs for _, theirs in averaged], 0)
        if copied:
            foreach_copy_([ours for ours, _ in copied], [theirs for _, theirs in copied])
        self.n_averaged += 1
