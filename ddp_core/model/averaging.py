"""The exponential moving average of a model's weights, with torch's own AveragedModel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ddp_core.base.torch_internals import foreach_copy_


class WeightAverage(AveragedModel):
    """A copy of a model whose weights are decay * average + (1 - decay) * weights after each `update_parameters`.

    The first update copies. Buffers, such as batch-norm statistics, are averaged as the weights are, but for buffers of
    whole numbers, which averaging would cut off, and of infinities (attention masks), which it would turn into NaN:
    these are copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, use_buffers=True)
        self._move = get_ema_multi_avg_fn(decay)
        self._is_averaged = [True for _ in model.parameters()]
        self._is_averaged += [
            buffer.is_floating_point() and bool(buffer.isfinite().all()) for buffer in model.buffers()
        ]

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Average with the model's weights as they are now.

        AveragedModel's own method copies its counter to the device, for averages other than this one, and makes the
        host wait for that at each step.
        """
        pairs = list(zip(_numbers(self.module), _numbers(model), self._is_averaged, strict=True))
        is_first = int(self.n_averaged) == 0  # on the CPU, wherever the model is
        averaged = [] if is_first else [(ours, theirs) for ours, theirs, is_averaged in pairs if is_averaged]
        copied = [(ours, theirs) for ours, theirs, is_averaged in pairs if is_first or not is_averaged]
        if averaged:
            self._move([ours for ours, _ in averaged], [theirs for _, theirs in averaged], 0)
        if copied:
            foreach_copy_([ours for ours, _ in copied], [theirs for _, theirs in copied])
        self.n_averaged += 1


def _numbers(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
