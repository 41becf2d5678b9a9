"""Batch normalisation that does not depend on who computed which micro-batch.

A batch-norm layer folds each forward into its running statistics, so their bits depend on how many micro-batches its
process saw, in which order. Here, while a step's micro-batches run, momentum is 1.0: the buffers then hold the
statistics of just that micro-batch. Those are summed over micro-batches in the canonical tree, like gradients, and
one update is made per step:

    running = (1 - momentum) * running + momentum * mean over micro-batches

(with `momentum=None`, a cumulative average over steps, as torch.nn.BatchNorm2d defines it over forwards), and
`num_batches_tracked` counts steps. Normalisation itself is untouched: each micro-batch uses its own statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ddp_core.base.torch_internals import foreach_copy_, foreach_zero_

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


class BatchStatistics:
    """Collects the batch-norm statistics of one module's micro-batches and makes one running update per step.

    Call `begin()` at the start of a step. After each forward push `take()`, one flat tensor, onto a GradientTree. At
    the end of the step call `finish(root)` with the root of that tree. Layers in evaluation mode or without running
    statistics are left alone. A layer called several times in one forward counts with its last call; one not called in
    a micro-batch is averaged over the others. With DDP, `broadcast_buffers` must be False. Raises ValueError for
    SyncBatchNorm, whose statistics depend on the world size.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [layer for layer in module.modules() if isinstance(layer, BatchNorm)]
        if any(isinstance(layer, nn.SyncBatchNorm) for layer in self._modules):
            raise ValueError("SyncBatchNorm normalises over the ranks of a layout, so no reduction can make it exact")
        self._layers: _Layers | None = None
        self._step: _Step | None = None

    def begin(self) -> None:
        """Set the true running statistics aside and let the buffers show one micro-batch at a time."""
        self.restore()
        active = [
            module
            for module in self._modules
            if module.training and module.track_running_stats and module.running_mean is not None
        ]
        if active:
            if self._layers is None or not self._layers.fit(active):
                self._layers = _Layers(active)
            self._step = _Step(self._layers)

    def take(self, weight: float = 1.0) -> Tensor:
        """Return the statistics of the micro-batch just run, times `weight`, as one flat tensor for the tree.

        Float32 (float64 if a layer's are): all means, all variances, then one weight per layer.
        """
        step = self._step
        if step is None:
            return torch.empty(0)
        weights = torch.stack(step.counters).clamp(max=1).to(step.before.dtype) * weight
        foreach_zero_(step.counters)
        return torch.cat([torch.cat(step.running) * weights[step.owner], weights])

    def zeros(self) -> Tensor:
        """A tensor like that of `take`, in which a rank without a micro-batch receives the sum."""
        step = self._step
        return torch.empty(0) if step is None else step.before.new_zeros(len(step.owner) + len(step.counters))

    def finish(self, total: Tensor) -> None:
        """Make the step's running update from the sum of all micro-batches' `take`, and restore the momenta."""
        step = self._step
        if step is None:
            return
        sums, weights = total.split([len(step.owner), len(step.counters)])
        seen = weights > 0
        step.steps += seen
        # In float64, then rounded to the tensors' dtype, as torch does with a momentum that is a Python number.
        momenta = torch.where(step.momenta.isnan(), 1.0 / step.steps.clamp(min=1).double(), step.momenta)
        taken, kept = momenta.to(total.dtype)[step.owner], (1.0 - momenta).to(total.dtype)[step.owner]
        updated = kept * step.before + taken * (sums / weights[step.owner])
        step.before = torch.where(seen[step.owner], updated, step.before)
        self.restore()

    def restore(self) -> None:
        """Give the layers their momenta and running statistics back. Without `finish`, those from before the step."""
        if self._step is not None:
            self._step.restore()
            self._step = None


class _Layers:
    """The active layers, and what stays the same from step to step.

    It is made once, because each copy of numbers to a GPU makes the host wait.
    """

    def __init__(self, modules: Sequence[BatchNorm]) -> None:
        self.modules = list(modules)
        self.plain_momenta = [module.momentum for module in modules]
        buffers = _running(modules)
        self.sizes, self.device = [buffer.numel() for buffer in buffers], buffers[0].device
        numbers = [math.nan if momentum is None else momentum for momentum in self.plain_momenta]
        self.momenta = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        """Each layer's momentum; NaN for a cumulative average."""
        layers = torch.arange(len(modules)).repeat(2)
        self.owner = torch.repeat_interleave(layers, torch.tensor(self.sizes)).to(self.device)
        """For each number of the running statistics laid end to end, the layer that it belongs to."""

    def fit(self, modules: Sequence[BatchNorm]) -> bool:
        """Whether `modules` are the same layers, with the same momenta, on the same device."""
        return (
            self.modules == modules
            and self.plain_momenta == [module.momentum for module in modules]
            and self.device == _buffer(modules[0].running_mean).device
        )


class _Step:
    """The buffers of the active layers, and their contents: all means, then all variances, laid end to end.

    `before` and `steps` are those from before the step, until `BatchStatistics.finish` updates them.
    """

    def __init__(self, layers: _Layers) -> None:
        self.layers = layers
        self.momenta, self.owner = layers.momenta, layers.owner
        self.running = _running(layers.modules)
        self.counters = [_buffer(module.num_batches_tracked) for module in layers.modules]
        flat = torch.cat(self.running)
        self.before = flat.to(torch.promote_types(flat.dtype, torch.float32))
        self.steps = torch.stack(self.counters)
        for module in layers.modules:
            module.momentum = 1.0
        foreach_zero_(self.counters)

    def restore(self) -> None:
        """Write momenta, statistics and counters back into the layers."""
        for module, momentum in zip(self.layers.modules, self.layers.plain_momenta, strict=True):
            module.momentum = momentum
        foreach_copy_(self.running, list(self.before.split(self.layers.sizes)))
        foreach_copy_(self.counters, list(self.steps.unbind()))


def _running(modules: Sequence[BatchNorm]) -> list[Tensor]:
    """The layers' running means, then their running variances."""
    means = [_buffer(module.running_mean) for module in modules]
    return means + [_buffer(module.running_var) for module in modules]


def _buffer(buffer: Tensor | None) -> Tensor:
    assert buffer is not None
    return buffer.detach()


def foreign_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers by name, without those that BatchStatistics looks after.

    What a forward changes in them (a counter, a moving average, a power iteration) happens once per micro-batch of
    one rank, so it cannot be the same on every layout.
    """
    handled = {
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in module.named_modules()
        if isinstance(layer, BatchNorm)
        for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers() if name not in handled}


def foreign_buffers_changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the buffers that differ between two results of `foreign_buffers`.

    A NaN that stays where it was is no change.
    """
    names = sorted(before.keys() | after.keys())
    return [name for name in names if name not in before or name not in after or not _same(before[name], after[name])]


def _same(before: Tensor, after: Tensor) -> bool:
    if torch.equal(before, after):
        return True
    may_hold_nan = (before.is_floating_point() or before.is_complex()) and before.layout is torch.strided
    if not may_hold_nan or (before.shape, before.dtype) != (after.shape, after.dtype):
        return False
    return torch.allclose(before, after, rtol=0.0, atol=0.0, equal_nan=True)
