"""From sample ids to tensors: one micro-batch at a time, in line or ahead of time, in worker processes or on a GPU.

The order is the caller's: step ids go in, steps come out in the same order, whatever the number of workers. What a
sample looks like depends on (seed, epoch, id) alone. Where the experiment's own code draws random numbers for it, they
follow from the key that came with the ids.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from ddp_core.base.errors import UserError
from ddp_core.base.keyed_draws import key_draws
from ddp_core.base.seeds import mix, sample_uniforms
from ddp_core.base.trees import (
    Batch,
    Collate,
    Key,
    StepIds,
    Tree,
    as_it_is,
    map_tensors,
    structure_difference,
    structure_of,
)
from ddp_core.base.user_code import user_code
from ddp_core.data.splits import Dataset, InMemory, Staged
from ddp_core.sampler import Ids

if TYPE_CHECKING:
    from ddp_core.base.own_generator import OwnGenerator
    from ddp_core.data.augment import Augmentation

Gathered = tuple[Tree, Tree, Tensor | None]
"""A micro-batch in the host's memory: inputs, targets, and uniforms float64 [n, draws] where the device needs them."""

_CPU = torch.device("cpu")
_PAIR = "a pair (inputs, targets), each a tensor or a dict, list or tuple of tensors"
_ALIGNMENT = 64
"""Bytes: torch's own tensors begin at a multiple."""


class Loader:
    """Fetches micro-batches of a data set onto a device, augmented where an augmentation is given.

    The tensors of a micro-batch begin at a multiple of 64 bytes, as torch's own do: alignment decides which vector
    instructions run, and so the last bits. Data sets need `__len__` and `__getitem__(index) -> (inputs, targets)`, two
    trees of tensors (`ddp_core.base.trees`), or whatever `collate` takes. A data set with `__getitems__(ids)` is asked
    for a whole micro-batch at once; it returns torch's list of samples, or a tuple of two trees of batch tensors, which
    leaves nothing to collate. A data set with `set_epoch(epoch)` is told the epoch before each micro-batch, in the
    process that fetches it; held-out samples are always those of epoch 0.

    A micro-batch is made in two parts. The host's part, `gather`, fetches the samples. The device's part, `finish`, is
    a function of these samples and of their keyed random numbers: what a Staged data set leaves to the device, and the
    augmentation where that may run there. On the CPU both run one after the other, in line or in the workers.
    """

    def __init__(
        self,
        dataset: Dataset,
        augmentation: Augmentation | None = None,
        seed: int = 0,
        workers: int = 0,
        collate: Collate | None = None,
        device: torch.device = _CPU,
    ) -> None:
        self.dataset = dataset
        self.augmentation = augmentation
        self.seed = seed
        self.workers = workers
        self.collate = collate
        self.device, self._on_cuda = device, device.type == "cuda"
        self._tell: Callable[[int], object] | None = getattr(dataset, "set_epoch", None)
        # A thread that fetches ahead may be in the next epoch already.
        self._telling = contextlib.nullcontext() if self._tell is None else threading.Lock()
        self._stored: Callable[[Ids, bool], Batch] = self._put_together
        self._finish_inputs: Callable[[Tree], Tree] = as_it_is
        # A Staged data set with a __getitems__ of its own is asked for finished micro-batches there, like any data set.
        getitems = getattr(type(dataset), "__getitems__", None)
        if isinstance(dataset, Staged) and getitems in (None, InMemory.__getitems__) and collate is None:
            self._stored, self._finish_inputs = dataset.gather, dataset.finish
        # An augmentation that runs on the host needs finished inputs, so that nothing is left to the device.
        self._device_has_part = augmentation is None or augmentation.on_device
        # Worker processes cannot pin memory, which is the CUDA driver's business.
        self._pins = self._on_cuda and workers == 0 and self._device_has_part
        # Ours draw nothing, and are spared the seeding.
        is_foreign = self._stored == self._put_together or not _is_ours(type(dataset))
        self.may_draw = is_foreign or not (augmentation is None or _is_ours(augmentation.apply))
        """Whether somebody else's code makes the samples, which may draw random numbers for them."""
        # A thread beside the one that trains must leave torch's default generator alone.
        self._own: OwnGenerator | None = None
        if self._on_cuda and workers == 0:
            from ddp_core.base.own_generator import OwnGenerator

            self._own = OwnGenerator(torch.Generator())

    def fetch(self, epoch: int, ids: Ids, key: Key | None = None) -> Batch:
        """Inputs and targets of the samples `ids` (int64 [n]), as they look in `epoch`, made while the caller waits."""
        gathered = self.gather(epoch, ids, key)
        if self._on_cuda:
            gathered = map_tensors(lambda tensor: tensor.to(self.device), gathered)
        return self.finish(gathered)

    def gather(self, epoch: int, ids: Ids, key: Key | None = None) -> Gathered:
        """The host's part of a micro-batch: inputs, targets, and the random numbers that the device's part needs.

        With a `key`, what the experiment's code draws follows from it.
        """
        own = contextlib.nullcontext() if key is None or not self.may_draw else self._keyed(key)
        with user_code("your data set"), own:
            with self._telling:
                if self._tell is not None:
                    self._tell(epoch)
                inputs, targets = self._stored(ids, self._pins)
            if self.augmentation is None:
                return inputs, targets, None
            uniforms = sample_uniforms(self.seed, epoch, ids, self.augmentation.draws)
            if self._device_has_part:
                return inputs, targets, torch.from_numpy(uniforms)
            augmented = self.augmentation.apply(self._finish_inputs(inputs), uniforms)
            return map_tensors(_as_torch_allocates, augmented), targets, None

    def finish(self, gathered: Gathered) -> Batch:
        """The device's part: the micro-batch that `gather` began, on whichever device its tensors are now."""
        inputs, targets, uniforms = gathered
        with user_code("your data set"):
            if self._device_has_part:
                inputs = self._finish_inputs(inputs)
            if self.augmentation is not None and uniforms is not None:
                inputs = self.augmentation.apply(inputs, uniforms)
        return map_tensors(_as_torch_allocates, inputs), targets

    def stream(self, wanted: Iterable[StepIds]) -> Generator[Sequence[Batch], None, None]:
        """The micro-batches of each wanted step, in the order in which they are wanted.

        With workers, and on CUDA, a few steps are made before they are asked for; the processes and the thread that
        make them end with the iterator.
        """
        if not self.workers and not self._on_cuda:
            yield from map(self._host_part, wanted)
            return
        from ddp_core.data.prefetching import brought_ahead, made_by_workers

        with contextlib.ExitStack() as stack:
            items: Iterable[Any] = wanted
            make: Callable[[Any], Any] = self._host_part
            if self.workers:
                items = stack.enter_context(contextlib.closing(made_by_workers(wanted, make, self.workers)))
                make = as_it_is
            if self._on_cuda:
                ahead = brought_ahead(items, make, self.finish, self.device)
                yield from stack.enter_context(contextlib.closing(ahead))
            else:
                yield from map(make, items)

    def _host_part(self, step_ids: StepIds) -> Sequence[Gathered] | Sequence[Batch]:
        """What the host makes of a step: its gathered micro-batches for a CUDA device, else the finished ones."""
        epoch, micro_batches, *keyed = step_ids
        keys = keyed[0] if keyed else [None] * len(micro_batches)
        gathered = [self.gather(epoch, ids, key) for ids, key in zip(micro_batches, keys, strict=True)]
        return gathered if self._on_cuda else [self.finish(micro_batch) for micro_batch in gathered]

    def _keyed(self, key: Key) -> contextlib.AbstractContextManager[object]:
        """A block in which random numbers follow from the key."""
        seed = mix(*key) >> 1
        key_draws(seed)
        generator = torch.default_generator if self._own is None else self._own.generator
        generator.manual_seed(seed)
        return contextlib.nullcontext() if self._own is None else self._own

    def _put_together(self, ids: Ids, pin_memory: bool) -> Batch:
        """A micro-batch of a data set that is not Staged, or for the experiment's own `collate`. Raises UserError."""
        numbers = ids.tolist()
        several = getattr(self.dataset, "__getitems__", None)
        found = [self.dataset[number] for number in numbers] if several is None else several(numbers)
        try:
            if not isinstance(found, tuple):
                if self.collate is None:
                    return _stacked(found, numbers)
                return _aligned(self.collate(found), "collate returned")
            if self.collate is None:
                return _aligned(found, "__getitems__ returned")
            raise UserError(
                "__getitems__ returns whole micro-batches, so that collate would never be called; "
                "remove one of the two, or let __getitems__ return a list of samples"
            )
        except UserError as error:
            raise UserError(f"data set {type(self.dataset).__name__}: {error}", error.exit_code) from None


def _is_ours(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("ddp_core.")


def _stacked(samples: list[Any], ids: Sequence[int]) -> Batch:
    """The samples, pairs (inputs, targets), as one such pair, whose tensors are [n, …]. `ids` are told in messages."""
    first = samples[0]
    if not isinstance(first, tuple | list) or len(first) != 2:
        raise UserError(
            f"sample {ids[0]} is {structure_of(first)}; let __getitem__ return {_PAIR}, "
            "or define collate(samples) in the experiment file, which returns one"
        )
    if any(isinstance(part, Mapping | list | tuple) for part in first):
        # default_collate takes the first sample's keys, and says nothing of others.
        for sample, number in zip(samples, ids, strict=True):
            found = structure_difference(first, sample, "(inputs, targets)")
            if found is not None:
                raise UserError(
                    f"samples {ids[0]} and {number} are built differently: {found}; let every sample have the same "
                    "keys and lengths, or define collate(samples) in the experiment file"
                )
    try:
        inputs, targets = default_collate(samples)
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"samples {list(ids)} cannot be put together: {' '.join(str(error).split())}; let every sample have the "
            "same shape and type, or define collate(samples) in the experiment file, which may pad them"
        ) from None
    return inputs, targets


def _aligned(batch: Any, source: str) -> Batch:
    """A batch that the experiment has made, its tensors copied where they do not begin at an address as torch's own do.

    The address of a tensor decides which vector instructions run, and so the last bits. numpy's arrays, for example,
    begin anywhere. Raises UserError, whose message begins with `source`, where the batch is no pair.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise UserError(f"{source} {structure_of(batch)}; let it be {_PAIR}")
    inputs, targets = map_tensors(_as_torch_allocates, batch)
    return inputs, targets


def _as_torch_allocates(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        return tensor
    # A conjugate that is still to be computed would be lost on the way from a loader process.
    tensor = tensor.resolve_conj().resolve_neg()
    # A loader process sends a view with all of its memory, which then begins at a page.
    offset = tensor.storage_offset() * tensor.element_size()
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT or offset % _ALIGNMENT else tensor
