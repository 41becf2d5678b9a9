"""Batch normalisation that does not depend on who computed which micro-batch.

A batch-norm layer folds each forward into its running statistics, so their bits depend on how many micro-batches its
process saw, in which order. Here, while a step's micro-batches run, the layers show buffers of ours in the place of
their own, and momentum is 1.0: after a forward these hold the statistics of just that micro-batch. They are summed over
micro-batches in the canonical tree, like gradients, and one update is made per step:

    running = (1 - momentum) * running + momentum * mean over micro-batches

(with `momentum=None`, a cumulative average over steps, as torch.nn.BatchNorm2d defines it over forwards), and
`num_batches_tracked` counts steps. Normalisation itself is untouched: each micro-batch uses its own statistics.

A forward may also read the running statistics: of a layer that it puts into evaluation mode for a while (pseudo
labels), or in a subclass (batch renormalisation). Every micro-batch begins with those of the step's beginning, and a
layer that is called in evaluation mode sees these, also after a call in training mode. So what is read depends on the
step alone, not on the micro-batches that this process ran before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_core.base.torch_internals import buffers_of, foreach_copy_

LOOKED_AFTER = ("running_mean", "running_var", "num_batches_tracked")
"""The buffers of a layer that are looked after here."""
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

    @property
    def layers(self) -> Sequence[BatchNorm]:
        """The layers that are looked after in the step at hand."""
        return () if self._step is None else self._step.layers.modules

    def begin(self) -> None:
        """Set the true running statistics aside and let the layers show one micro-batch at a time."""
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
        layers = step.layers
        layers.keep_hold()
        # Few operators, since this comes after every micro-batch. A layer that was called counts once.
        weights = layers.counts > step.steps
        if weight != 1.0:
            weights = weights.to(step.before.dtype) * weight
        of_each = weights.index_select(0, layers.owner_with_weights)
        taken = layers.statistics_and_ones().to(step.before.dtype) * of_each
        layers.show(step.before, step.steps)
        return taken

    def zeros(self) -> Tensor:
        """A tensor like that of `take`, in which a rank without a micro-batch receives the sum."""
        step = self._step
        return torch.empty(0) if step is None else step.before.new_zeros(len(step.owner) + len(step.steps))

    def finish(self, total: Tensor) -> None:
        """Make the step's running update from the sum of all micro-batches' `take`, and restore the momenta."""
        step = self._step
        if step is None:
            return
        sums, weights = total.split([len(step.owner), len(step.steps)])
        seen = weights > 0
        step.steps += seen
        taken, kept = step.layers.factors(step.steps, total.dtype)
        updated = kept * step.before + taken * (sums / weights.index_select(0, step.owner))
        self.restore()
        step.write(torch.where(seen.index_select(0, step.owner), updated, step.before))

    def restore(self) -> None:
        """Give the layers their momenta and running statistics back. Without `finish`, those from before the step."""
        if self._step is not None:
            self._step.restore()
            self._step = None


class _Layers:
    """The active layers, what stays the same from step to step, and what they show while micro-batches run.

    It is made once, because each copy of numbers to a GPU makes the host wait. What layers show in the place of their
    buffers are views of a few flat tensors, which keep their memory, since a CUDA graph writes to it again.
    """

    def __init__(self, modules: Sequence[BatchNorm]) -> None:
        self.modules = list(modules)
        self.plain_momenta = [module.momentum for module in modules]
        buffers = _running(modules)
        self.sizes, self.device = [buffer.numel() for buffer in buffers], buffers[0].device
        self._kinds = [(buffer.dtype, buffer.device) for buffer in buffers]
        numbers = [math.nan if momentum is None else momentum for momentum in self.plain_momenta]
        self.momenta = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        """Each layer's momentum; NaN for a cumulative average."""
        layers = torch.arange(len(modules)).repeat(2)
        self.owner = torch.repeat_interleave(layers, torch.tensor(self.sizes)).to(self.device)
        """For each number of the running statistics laid end to end, the layer that it belongs to."""
        self.owner_with_weights = torch.cat([self.owner, torch.arange(len(modules), device=self.device)])
        """These layers, with one number more for each layer: its own weight."""
        self._factors: tuple[Tensor, Tensor] | None = None
        self._flats: list[Tensor] = []
        self._with_ones: list[Tensor] = []
        """This memory, with a one for each layer behind it."""
        views: list[Tensor] = []
        # One flat tensor, unless layers have several dtypes.
        for dtype, of_dtype in itertools.groupby(buffers, lambda buffer: buffer.dtype):
            sizes = [buffer.numel() for buffer in of_dtype]
            whole = torch.ones(sum(sizes) + len(modules), dtype=dtype, device=self.device)
            self._with_ones.append(whole)
            self._flats.append(whole[: sum(sizes)])
            views += self._flats[-1].split(sizes)
        self.counts = torch.stack([_buffer(module.num_batches_tracked) for module in modules])
        half = len(modules)
        self.shown = [
            dict(zip(LOOKED_AFTER, of_layer, strict=True))
            for of_layer in zip(views[:half], views[half:], self.counts.unbind(), strict=True)
        ]
        """For each layer its buffers by name."""
        self._foreign_forwards = [
            (buffers_of(module), shown)
            for module, shown in zip(modules, self.shown, strict=True)
            if type(module).forward is not nn.BatchNorm1d.forward
        ]
        """Layers with a forward that is not torch's: their buffers as they have them, and these ones."""

    def factors(self, steps: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """For each number of the running statistics, what a step takes of the new one, and keeps of the old one.

        `steps`: of each layer, with the step at hand. Kept where no layer makes a cumulative average.
        """
        if self._factors is not None:
            return self._factors
        # In float64, then rounded to the tensors' dtype, as torch does with a momentum that is a Python number.
        momenta = torch.where(self.momenta.isnan(), 1.0 / steps.clamp(min=1).double(), self.momenta)
        of_layers = momenta.to(dtype), (1.0 - momenta).to(dtype)
        taken, kept = (each.index_select(0, self.owner) for each in of_layers)
        if None not in self.plain_momenta:
            self._factors = taken, kept
        return taken, kept

    def fit(self, modules: Sequence[BatchNorm]) -> bool:
        """Whether `modules` are the same layers, with the same momenta, in the same dtypes and on the same device."""
        return (
            self.modules == modules
            and self.plain_momenta == [module.momentum for module in modules]
            and self._kinds == [(buffer.dtype, buffer.device) for buffer in _running(modules)]
        )

    def keep_hold(self) -> None:
        """Take in what a forward that is not torch's has put in the place of these buffers."""
        for buffers, shown in self._foreign_forwards:
            for name, ours in shown.items():
                if (theirs := buffers[name]) is not ours and theirs is not None:
                    ours.copy_(theirs.detach())
                    buffers[name] = ours

    def statistics_and_ones(self) -> Tensor:
        """All means, then all variances, then a one for each layer."""
        return self._with_ones[0] if len(self._flats) == 1 else torch.cat([*self._flats[:-1], self._with_ones[-1]])

    def show(self, statistics: Tensor, counts: Tensor) -> None:
        """Let the layers see these: all means, then all variances, and how many batches each layer has tracked."""
        for flat, part in zip(self._flats, statistics.split(list(map(len, self._flats))), strict=True):
            flat.copy_(part)
        self.counts.copy_(counts)


class _Step:
    """A step that has begun: the active layers show other buffers, and their own stay as they were before the step.

    `before` and `steps` are copies of those: all means, then all variances, laid end to end.
    """

    def __init__(self, layers: _Layers) -> None:
        self.layers = layers
        self.owner = layers.owner
        self._running = _running(layers.modules)
        self._counters = [_buffer(module.num_batches_tracked) for module in layers.modules]
        flat = torch.cat(self._running)
        self.before = flat.to(torch.promote_types(flat.dtype, torch.float32))
        self.steps = torch.stack(self._counters)
        layers.show(self.before, self.steps)
        self._own: dict[nn.Module, dict[str, Tensor | None]] = {}
        self._hooks = []
        for module, shown in zip(layers.modules, layers.shown, strict=True):
            buffers = buffers_of(module)
            self._own[module] = {name: buffers[name] for name in LOOKED_AFTER}
            buffers.update(shown)
            module.momentum = 1.0
            self._hooks.append(module.register_forward_pre_hook(self._before_call))

    def restore(self) -> None:
        """Give the layers their momenta and their own buffers back."""
        for hook in self._hooks:
            hook.remove()
        for module, momentum in zip(self.layers.modules, self.layers.plain_momenta, strict=True):
            module.momentum = momentum
            buffers_of(module).update(self._own[module])

    def write(self, statistics: Tensor) -> None:
        """Write statistics, and counters from `steps`, into the layers' own buffers."""
        foreach_copy_(self._running, list(statistics.split(self.layers.sizes)))
        foreach_copy_(self._counters, list(self.steps.unbind()))

    def _before_call(self, layer: nn.Module, _: Any) -> None:
        """Let a layer in evaluation mode see its own buffers for this call."""
        # Where a forward is compiled, it shows what a call in training mode has left, if there was one.
        if layer.training or torch.compiler.is_compiling() or layer not in self._own:
            return
        buffers, own = buffers_of(layer), self._own[layer]
        shown = {name: buffers[name] for name in own}

        def put_back(*_: Any) -> None:
            hook.remove()
            buffers.update(shown)

        hook = layer.register_forward_hook(put_back, always_call=True)
        buffers.update(own)

    def __deepcopy__(self, _: Any) -> _Step:
        """A layer that forward copies takes its hooks along; they must not take the step along."""
        return self


def _running(modules: Sequence[BatchNorm]) -> list[Tensor]:
    """The layers' running means, then their running variances."""
    means = [_buffer(module.running_mean) for module in modules]
    return means + [_buffer(module.running_var) for module in modules]


def _buffer(buffer: Tensor | None) -> Tensor:
    assert buffer is not None
    return buffer.detach()
