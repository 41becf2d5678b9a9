"""One process, several replicas, each driven by a thread: nn.DataParallel's five moves, and nn.DataParallel itself.

In every step nn.DataParallel scatters the batch, replicates the module, applies the replicas in parallel threads,
gathers the outputs, and in backward reduces the gradients onto the first device. `DataParallelStrategy` makes the same
moves over copies of the module. So layouts can be compared on a laptop, since on CPU torch's class only calls the
module; and gradients can be added in a chosen order, since torch's class adds them inside autograd. Two things differ:
each thread runs its own backward (torch's CPU autograd would run them one after the other), and losses are gathered
instead of outputs.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import methodcaller
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ddp_core.base.determinism import one_thread
from ddp_core.base.digests import checksum
from ddp_core.base.errors import UserError
from ddp_core.base.own_generator import OwnGenerator
from ddp_core.base.seeds import MicroBatchSeed, share_of
from ddp_core.base.torch_internals import foreach_copy_, is_compiled, share_hooks
from ddp_core.base.trees import Batch, map_tensors, tensors_of
from ddp_core.config.cut import BatchCut
from ddp_core.observe.step import StepBatch
from ddp_core.reduction import BatchStatistics, GradientTree, fold_replicas, take_gradients
from ddp_core.reduction.tree import add_
from ddp_core.reduction.watching import DependsOnLayout, ForeignBuffers, TrainedParameters, WrittenParameters
from ddp_core.trainers.passes import InPrecision, Passes
from ddp_core.trainers.strategy import Strategy

_SETTINGS = (bool, int, float, str, type(None))
"""Types of attributes by which a callback may change what a model computes."""


class DataParallelStrategy(Strategy):
    """The strategy of `dp`, except for the plain reduction on CUDA: each replica of the model runs in its own thread.

    On CUDA the replicas are dealt to the devices in turn, so several may share a device. No thread chooses a stream:
    all of a device's work is queued on its default stream, whichever thread queues it, and torch makes a copy between
    two devices wait for the default streams of both. Not run on two GPUs yet.
    """

    def set_up(self) -> None:
        count, first = self.job.layout.nproc_per_node, self.job.device
        devices = [first] * count
        if first.type == "cuda":
            devices = [torch.device("cuda", number % torch.cuda.device_count()) for number in range(count)]
        turns = {device: threading.Lock() for device in devices if device.type == "cuda"}
        self.replicas = [
            _Replica(self, number, device, turns.get(device, contextlib.nullcontext()))
            for number, device in enumerate(devices)
        ]
        self._is_compiled = self.job.is_exact and len(devices) > 1 and is_compiled(self.model)

    def compute_gradients(self, batch: StepBatch) -> None:
        """Scatter, replicate, parallel apply, gather, reduce. Raises UserError for a compiled model.

        Such a model can be evaluated, but has no replicas.
        """
        if self._is_compiled:
            raise UserError(
                "torch.compile under --layout dp: a replica is a copy of the model, which torch does not compile as "
                "the model, so replicas would have other bits; use --layout ddp, or leave torch.compile out"
            )
        scattered = self._scatter(batch)
        first, *others = self.replicas
        if not scattered[0].micro_batches:
            self.write_along(batch)
        for replica in others:
            replica.copy_from(self.model, bool(self.job.parts.callbacks))
        # A state that is compared on other layouts after this step.
        by_values = self.job.is_exact and self.compares_after(batch.step + 1)
        if self.job.is_exact:
            first.begin(by_values)
            for replica in others:
                replica.begin(by_values, first.foreign.digests)
        loss_weight = self.passes.loss_weight(batch.divisor)
        weights = [loss_weight.to(replica.device) for replica in self.replicas]
        self.clock.lap("exposed_communication")
        applied = [
            replica.thread.submit(replica.apply, share, self.batches.cut, weight)
            for replica, share, weight in zip(self.replicas, scattered, weights, strict=True)
        ]
        computed = [future.result() for future in applied]
        self.clock.lap("forward_backward")
        if self.job.is_exact:
            used = [replica.written for replica in others if scattered[replica.number].micro_batches]
            self._require_same_parameters(first.written, used, by_values)
        for of_replica in computed:
            for index, loss in of_replica.losses:
                # Here, not in the replicas' threads, for the same reason as in `_scatter`.
                self.losses.put(index, loss.to(self.job.device, non_blocking=True))
        self.send_losses(batch)
        self._reduce(computed)

    def retrain(self) -> None:
        for replica in self.replicas:
            replica.retrain(self.model)

    def close(self) -> None:
        for replica in self.replicas:
            replica.thread.shutdown()

    def _require_same_parameters(
        self, first: WrittenParameters, others: Sequence[WrittenParameters], by_values: bool
    ) -> None:
        """Compare what the passes of other replicas have left in their parameters with the first one's, which are kept.

        Those that were written to, or all of them by their values. Raises DependsOnLayout, naming the first.
        """
        written = first.written.union(*(other.written for other in others))
        for position in range(len(first.parameters)) if by_values and others else sorted(written):
            values = checksum(first.parameters[position])
            if any(checksum(other.parameters[position]) != values for other in others):
                raise DependsOnLayout(
                    f"forward changes {first.named(position)} in one replica otherwise than in another, so its values "
                    f"depend on the layout: {first.advice(position)}"
                )

    def _scatter(self, batch: StepBatch) -> list[StepBatch]:
        """Each replica's part of the batch, on its device: the first share has the first micro-batches, and so on."""
        parts, stop = [], 0
        for replica in self.replicas:
            start, stop = stop, stop + len(self.batches.cut.share(replica.number, batch.samples))
            own = slice(start, stop)
            tensors = batch.tensors[own]
            if replica.device != self.job.device:
                # Copied here for all replicas, before the devices are busy: a copy makes both its devices wait.
                bring = methodcaller("to", replica.device, non_blocking=True)
                tensors = [(map_tensors(bring, inputs), map_tensors(bring, targets)) for inputs, targets in tensors]
            parts.append(replace(batch, micro_batches=batch.micro_batches[own], ids=batch.ids[own], tensors=tensors))
        return parts

    def _reduce(self, computed: Sequence[_Computed]) -> None:
        """Sum all gradients into the first replica's: in the canonical tree, or from left to right as torch does."""
        first, *others = self.replicas
        if self.job.is_exact:
            gradients = fold_replicas([each.tree for each in computed])
            statistics = fold_replicas([each.statistics for each in computed])[0]
            assert statistics is not None
            first.statistics.finish(statistics.to(self.job.device, non_blocking=True))
            for replica in others:
                replica.statistics.restore()
        else:
            gradients = computed[0].gradients
            for each in computed[1:]:
                add_(gradients, each.gradients)
        for parameter, gradient in zip(first.trained.parameters, gradients, strict=True):
            # Where the first replica had no gradient, the sum lies on another replica's device.
            parameter.grad = None if gradient is None else gradient.to(parameter.device, non_blocking=True)


class _Computed(NamedTuple):
    """What a replica has computed in one step."""

    losses: list[tuple[int, Tensor]]
    """The number of each micro-batch, and its loss."""
    tree: GradientTree
    statistics: GradientTree
    gradients: list[Tensor | None]
    """The sums of the plain reduction; the exact one has trees."""


class _Replica:
    """A replica of the model on `device`, and its thread.

    The replica computes each micro-batch while it holds `turn`: on CUDA the lock of its device.
    """

    def __init__(
        self,
        strategy: Strategy,
        number: int,
        device: torch.device,
        turn: contextlib.AbstractContextManager[object],
    ) -> None:
        job, model = strategy.job, strategy.model
        self.number, self.device, self._turn = number, device, turn
        self._is_exact = job.is_exact
        self.module = model if number == 0 else copy.deepcopy(model).to(device)
        self.passes = strategy.passes
        if device != job.device:
            self.passes = Passes(job.experiment, job.parts.loss, device)
        self.retrain(model)
        self.statistics, self.foreign = BatchStatistics(self.module), ForeignBuffers(self.module)
        self.written = WrittenParameters(self.module)
        self.random = KeyedRandom(job.experiment.seed, device)
        self.thread = one_thread(f"replica-{number}", device)

    def retrain(self, model: nn.Module) -> None:
        """Train the parameters that `model` trains."""
        for ours, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            ours.requires_grad_(theirs.requires_grad)
        self.trained = TrainedParameters(self.module)

    @torch.no_grad()
    def copy_from(self, model: nn.Module, with_settings: bool) -> None:
        """Copy the first replica's parameters and buffers, as nn.DataParallel does before every forward.

        The hooks on its weights come along, which no copy of a module takes, and `with_settings` what callbacks may
        have set.
        """
        ours, theirs = ([*module.parameters(), *module.buffers()] for module in (self.module, model))
        foreach_copy_(ours, theirs, non_blocking=True)
        for our, their in zip(ours, theirs, strict=True):
            share_hooks(our, their)
        if with_settings:
            for copied, module in zip(self.module.modules(), model.modules(), strict=True):
                settings = {name: each for name, each in module.__dict__.items() if isinstance(each, _SETTINGS)}
                copied.__dict__.update(settings)

    def begin(self, by_values: bool, digests: Mapping[str, str] | None = None) -> None:
        """Start a step of the exact reduction.

        `by_values`: whether parameters are compared by their values. `digests` are those of the first replica's
        buffers.
        """
        self.statistics.begin()
        self.foreign.begin(self.statistics.layers, digests)
        self.written.begin(by_values)

    def apply(self, share: StepBatch, cut: BatchCut, weight: Tensor) -> _Computed:
        """Forward and backward of this replica's micro-batches; `weight` is the loss_weight."""
        count = cut.count(share.samples)
        own = share_of(count, self.number, cut.shares)
        tree, statistics = (GradientTree(count, own.start, own.stop) for _ in range(2))
        take_gradients(self.trained.parameters)
        losses = []
        for part, data in zip(share.micro_batches, share.tensors, strict=True):
            # The turn lasts to the end of backward, which uses the generator where it computes activations again.
            with self._turn:
                with self.random.micro_batch(share.step, part.index):
                    loss = self.passes.loss(self.module, *data)
                with self.random.backward():
                    self.passes.backward(loss, weight)
            losses.append((part.index, loss.detach()))
            if self._is_exact:
                tree.push(take_gradients(self.trained.parameters))
                statistics.push([self.statistics.take(part.stop - part.start)])
                self.written.refuse_changes(is_last=part is share.micro_batches[-1])
        if self._is_exact:
            self.trained.refuse_changes()
            self.foreign.refuse_changed()
        return _Computed(losses, tree, statistics, [] if self._is_exact else take_gradients(self.trained.parameters))


class KeyedRandom:
    """Gives the random operations of one thread numbers of their own, keyed by (seed, step, micro-batch).

    The numbers are those that the default generators give after `MicroBatchSeed`, so one process and replicas in
    threads drop the same units. On the CPU each thread gets its own generator. CUDA's operation behind dropout takes no
    generator: there the default generator is seeded, so the replicas that share a device must take turns; and what they
    draw on the CPU with torch is not keyed, for that generator is one for the threads of all devices.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = MicroBatchSeed(seed, device)
        self._own: OwnGenerator | None = None
        if device.type == "cpu":
            self._own = OwnGenerator(torch.Generator())
            self._seed.generators = [self._own.generator]
        else:
            self._seed.generators = self._seed.generators[1:]
        self._has_run = self._draws_in_backward = False

    @contextlib.contextmanager
    def micro_batch(self, step: int, index: int) -> Iterator[None]:
        """Run one forward with the numbers of (step, micro-batch)."""
        self._seed(step, index)
        if self._own is None:
            yield
            return
        self._own.has_told_state = False
        with self._own:
            yield

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Run the backward of that forward with the numbers that follow.

        Few draw any; activation checkpointing does, to compute dropout again. Handing out the thread's own generator
        slows every operation down. So it is done in the first backward, in all after one that has drawn, and where the
        forward has asked for the generator's state: a layer may be checkpointed in later micro-batches alone.
        """
        own = self._own
        if own is None or (self._has_run and not self._draws_in_backward and not own.has_told_state):
            yield
            return
        own.has_drawn = False
        with own:
            yield
        self._has_run, self._draws_in_backward = True, self._draws_in_backward or own.has_drawn


class CudaDataParallelStrategy(Strategy):
    """The strategy of `dp` for the plain reduction on CUDA: nn.DataParallel itself.

    A step goes in rounds; in each, every device computes one micro-batch.
    """

    def set_up(self) -> None:
        devices = [torch.device("cuda", number) for number in range(self.job.layout.nproc_per_node)]
        self.module = nn.DataParallel(InPrecision(self.model, self.passes), device_ids=devices)
        self.device_seeds = [MicroBatchSeed(self.job.experiment.seed, device) for device in devices]

    def compute_gradients(self, batch: StepBatch) -> None:
        """Call nn.DataParallel once per round; it scatters, replicates, applies, gathers and reduces."""
        for parameter in self.model.parameters():
            parameter.grad = None
        weight = self.passes.loss_weight(batch.divisor)
        for members in _rounds(batch, self.batches.cut.shares, self.batches.cut.count(batch.samples)):
            parts = [batch.micro_batches[member] for member in members]
            for seed, part in zip(self.device_seeds, parts, strict=False):
                seed(batch.step, part.index)
            inputs, targets = _joined(
                [batch.tensors[member] for member in members], [part.stop - part.start for part in parts]
            )
            loss = self.passes.loss(self.module, inputs, targets)
            self.losses.put(parts[0].index, loss.detach())
            self.passes.backward(loss, weight)
        self.send_losses(batch)


def _joined(batches: Sequence[Batch], samples: Sequence[int]) -> Batch:
    """The micro-batches of a round as one batch, which nn.DataParallel cuts again along the first dimension.

    Raises UserError where that cut would be another one, or where shapes differ.
    """
    for batch, count in zip(batches, samples, strict=True):
        sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors_of(batch)} - {count}
        if sizes:
            raise UserError(
                f"nn.DataParallel cuts every tensor along its first dimension, but a micro-batch of {count} samples "
                f"has a tensor with {min(sizes)} there; let it have one row per sample, or use --layout ddp"
            )
    try:
        inputs, targets = map_tensors(lambda *parts: torch.cat(parts), *batches)
    except RuntimeError as error:
        raise UserError(
            "nn.DataParallel takes the micro-batches of all devices as one batch, and these have different shapes "
            f"({error}); let collate pad to a fixed length, or use --layout ddp"
        ) from None
    return inputs, targets


def _rounds(batch: StepBatch, shares: int, count: int) -> list[Sequence[int]]:
    """The rounds of a step: round n has the n-th micro-batch of every share, as its position in `micro_batches`."""
    positions = {part.index: number for number, part in enumerate(batch.micro_batches)}
    owned = [share_of(count, share, shares) for share in range(shares)]
    longest = max(len(share) for share in owned)
    return [[positions[share[turn]] for share in owned if turn < len(share)] for turn in range(longest)]
