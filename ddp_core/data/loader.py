"""From sample ids to tensors: one micro-batch at a time, in line or ahead of time, in worker processes or on a GPU.

The order is the caller's: step ids go in, steps come out in the same order, whatever the number of workers. What a
sample looks like depends on (seed, epoch, id) alone.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import signal
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.process import die_with_parent
from ddp_core.base.seeds import sample_uniforms
from ddp_core.base.torch_internals import end_loader_workers
from ddp_core.base.user_code import user_code
from ddp_core.data.augment import Augmentation
from ddp_core.data.collating import Batch, Collate, aligned, collated, stack
from ddp_core.data.prefetching import brought_ahead
from ddp_core.data.splits import Dataset, InMemory
from ddp_core.data.staged import Staged
from ddp_core.data.trees import Tree, map_tensors, tensors_of
from ddp_core.sampler import Ids

StepIds = tuple[int, Sequence[Ids]]
"""An epoch, and the ids of each micro-batch of one step."""
Gathered = tuple[Tree, Tree, Tensor | None]
"""A micro-batch in the host's memory: inputs, targets, and uniforms float64 [n, draws] where the device needs them."""
Made = TypeVar("Made")

_CPU = torch.device("cpu")

_PREFETCHED = 2
"""Steps that torch has each worker prepare ahead, its default."""
_PAGE = 4096
_SEMAPHORES = 2**18
"""Bytes of shared memory for the workers' queues, generously."""
_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Loader:
    """Fetches micro-batches of a data set onto a device, augmented where an augmentation is given.

    Every micro-batch has tensors of its own, never views into larger ones: alignment decides which vector instructions
    run, and so the last bits. Data sets need `__len__` and `__getitem__(index) -> (inputs, targets)`, two trees of
    tensors (`ddp_core.data.trees`), or whatever `collate` takes. One with `__getitems__(ids)` is asked for a
    micro-batch at once and answers with torch's list of samples, or with a tuple of two trees of batch tensors, which
    leaves nothing to collate.

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
        staged = None if collate is not None else _in_two_parts(dataset)
        self._stored: Callable[[Ids, bool], Batch] = self._put_together if staged is None else staged.gather
        self._finish_inputs: Callable[[Tree], Tree] = _as_it_is if staged is None else staged.finish
        self._device_has_part = augmentation is None or augmentation.on_device
        # Worker processes cannot pin memory, which is the CUDA driver's business.
        self._pins = self._on_cuda and workers == 0 and self._device_has_part

    def fetch(self, epoch: int, ids: Ids) -> Batch:
        """Inputs and targets of the samples `ids` (int64 [n]), as they look in `epoch`, made while the caller waits."""
        gathered = self.gather(epoch, ids)
        if self._on_cuda:
            gathered = map_tensors(lambda tensor: tensor.to(self.device), gathered)
        return self.finish(gathered)

    def gather(self, epoch: int, ids: Ids) -> Gathered:
        """The host's part of a micro-batch: inputs, targets, and the random numbers that the device's part needs."""
        with user_code("your data set"):
            inputs, targets = self._stored(ids, self._pins)
            if self.augmentation is None:
                return inputs, targets, None
            uniforms = sample_uniforms(self.seed, epoch, ids, self.augmentation.draws)
            if self._device_has_part:
                return inputs, targets, torch.from_numpy(uniforms)
            return self.augmentation.apply(self._finish_inputs(inputs), uniforms), targets, None

    def finish(self, gathered: Gathered) -> Batch:
        """The device's part: the micro-batch that `gather` began, on whichever device its tensors are now."""
        inputs, targets, uniforms = gathered
        with user_code("your data set"):
            if self._device_has_part:
                inputs = self._finish_inputs(inputs)
            if self.augmentation is not None and uniforms is not None:
                inputs = self.augmentation.apply(inputs, uniforms)
        return inputs, targets

    def stream(self, wanted: Iterable[StepIds]) -> Generator[Sequence[Batch], None, None]:
        """The micro-batches of each wanted step, in the order in which they are wanted.

        With workers, and on CUDA, a few steps are taken ahead. Closing the iterator, or ending it, ends what works
        ahead.
        """
        if not self._on_cuda:
            yield from self._by_workers(wanted, self._step) if self.workers else map(self._step, wanted)
            return
        with contextlib.ExitStack() as stack:
            if self.workers:
                gathered = stack.enter_context(contextlib.closing(self._by_workers(wanted, self._gather_step)))
                steps = brought_ahead(gathered, _as_it_is, self.finish, self.device)
            else:
                steps = brought_ahead(wanted, self._gather_step, self.finish, self.device)
            yield from stack.enter_context(contextlib.closing(steps))

    def _step(self, step_ids: StepIds) -> list[Batch]:
        return [self.finish(gathered) for gathered in self._gather_step(step_ids)]

    def _gather_step(self, step_ids: StepIds) -> list[Gathered]:
        epoch, micro_batches = step_ids
        return [self.gather(epoch, ids) for ids in micro_batches]

    def _by_workers(self, wanted: Iterable[StepIds], make: Callable[[StepIds], Made]) -> Generator[Made, None, None]:
        """What `make` returns for each wanted step, made by worker processes, which end with the generator."""
        rest = iter(wanted)
        first = next(rest, None)
        if first is None:
            return
        self._require_shared_memory(first, make)
        ahead = iter(
            DataLoader(
                _Steps(make),
                batch_size=None,
                sampler=itertools.chain([first], rest),
                num_workers=self.workers,
                collate_fn=_as_it_is,
                # A fork knows the classes of the experiment file; another process could not import them. Linux forks by
                # default, but not in a process that was itself started in another way (`--launcher spawn`).
                multiprocessing_context="fork",
                worker_init_fn=_begin_worker,
                # Otherwise it draws from torch's global generator, whose state would then depend on the workers.
                generator=torch.Generator(),
            )
        )
        try:
            while True:
                # What a data set raises in a worker is raised here.
                with user_code("your data set"):
                    step = next(ahead, None)
                if step is None:
                    break
                if isinstance(step, UserError):
                    raise step
                yield step
        finally:
            end_loader_workers(ahead)

    def _require_shared_memory(self, step_ids: StepIds, make: Callable[[StepIds], object]) -> None:
        """Raises UserError (4) where /dev/shm cannot hold what the workers prepare ahead: torch would crash or hang."""
        place = Path("/dev/shm")
        if not place.exists():
            return
        epoch, micro_batches = step_ids
        pages = [-(-tensor.nbytes // _PAGE) * _PAGE for tensor in tensors_of(make((epoch, micro_batches[:1])))]
        needed = sum(pages) * len(micro_batches) * (_PREFETCHED * self.workers + 1) + _SEMAPHORES
        free = shutil.disk_usage(place).free
        if free < needed:
            raise UserError(
                f"/dev/shm has {_size(free)} free, {self.workers} loader processes need about {_size(needed)}: "
                "give the container more (shm_size: 1gb in compose.yaml, docker run --shm-size 1g), or use --workers 0",
                ExitCode.RESOURCES,
            )

    def _put_together(self, ids: Ids, pin_memory: bool) -> Batch:
        """A micro-batch of a data set that is not Staged, or for the experiment's own `collate`. Raises UserError."""
        numbers = ids.tolist()
        several = getattr(self.dataset, "__getitems__", None)
        found = [self.dataset[number] for number in numbers] if several is None else several(numbers)
        try:
            if isinstance(found, tuple) and self.collate is not None:
                raise UserError(
                    "__getitems__ returns whole micro-batches, so that collate would never be called; "
                    "remove one of the two, or let __getitems__ return a list of samples"
                )
            if isinstance(found, tuple):
                return aligned(found, "__getitems__ returned")
            return stack(found, numbers) if self.collate is None else collated(self.collate, found, numbers)
        except UserError as error:
            raise UserError(f"data set {type(self.dataset).__name__}: {error}", error.exit_code) from None


class _Steps(TorchDataset[Made | UserError]):
    """`make` as a data set whose index is a step's ids: so torch's DataLoader hands work to its processes."""

    def __init__(self, make: Callable[[StepIds], Made]) -> None:
        self.make = make

    def __getitem__(self, step_ids: StepIds) -> Made | UserError:
        try:
            return self.make(step_ids)
        except UserError as error:
            return error  # raised in a worker, it would arrive with the worker's traceback for a message


def _in_two_parts(dataset: Dataset) -> Staged | None:
    """The data set itself, if it leaves a part to the device, else None.

    A Staged data set with a `__getitems__` of its own is asked for finished micro-batches there, as any other.
    """
    whole = getattr(type(dataset), "__getitems__", None)
    return dataset if isinstance(dataset, Staged) and whole in (None, InMemory.__getitems__) else None


def _as_it_is(value: Made) -> Made:
    return value


def _begin_worker(_: int) -> None:
    """Let the training process decide what a request to stop means, and do not outlive it.

    A terminal, a scheduler and torchrun send theirs to every process, but a step that is to be finished needs its data.
    torch's own worker looks for its parent between two steps only, so a worker that hangs inside a data set would stay
    for ever.
    """
    for number in _REQUESTS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
