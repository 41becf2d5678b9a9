"""From sample ids to tensors: one micro-batch at a time, in line or ahead of time in worker processes.

The order is the caller's: step ids go in, steps come out in the same order, whatever the number of workers. What a
sample looks like depends on (seed, epoch, id) alone.
"""

from __future__ import annotations

import itertools
import shutil
import signal
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from ddp_core.data.augment import Augmentation
from ddp_core.data.collating import Batch, Collate, aligned, collated, stack
from ddp_core.data.splits import Dataset, InMemory
from ddp_core.data.trees import map_tensors, tensors_of
from ddp_core.determinism.seeds import sample_uniforms
from ddp_core.errors import ExitCode, UserError
from ddp_core.orphans import die_with_parent
from ddp_core.sampler import Ids
from ddp_core.torch_internals import end_loader_workers

StepIds = tuple[int, Sequence[Ids]]
"""An epoch, and the ids of each micro-batch of one step."""

_PREFETCHED = 2
"""Steps that torch has each worker prepare ahead, its default."""
_PAGE = 4096
_SEMAPHORES = 2**18
"""Bytes of shared memory for the workers' queues, generously."""
_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Loader:
    """Fetches micro-batches of a data set, augmented where an augmentation is given.

    Every micro-batch has tensors of its own, never views into larger ones: alignment decides which vector instructions
    run, and so the last bits. Data sets need `__len__` and `__getitem__(index) -> (inputs, targets)`, two trees of
    tensors (`ddp_core.data.trees`), or whatever `collate` takes. One with `__getitems__(ids)` is asked for a
    micro-batch at once and answers with torch's list of samples, or with a tuple of two trees of batch tensors, which
    leaves nothing to collate.
    """

    def __init__(
        self,
        dataset: Dataset,
        augmentation: Augmentation | None = None,
        seed: int = 0,
        workers: int = 0,
        pin_memory: bool = False,
        collate: Collate | None = None,
    ) -> None:
        self.dataset = dataset
        self.augmentation = augmentation
        self.seed = seed
        self.workers = workers
        self.pin_memory = pin_memory
        self.collate = collate
        whole = dataset.__getitems__ if isinstance(dataset, InMemory) and collate is None else self._put_together
        self._whole: Callable[[Ids], Batch] = whole

    def fetch(self, epoch: int, ids: Ids) -> Batch:
        """Inputs and targets of the samples `ids` (int64 [n]), as they look in `epoch`."""
        inputs, targets = self._whole(ids)
        if self.augmentation is not None:
            inputs = self.augmentation.apply(inputs, sample_uniforms(self.seed, epoch, ids, self.augmentation.draws))
        return inputs, targets

    def stream(self, wanted: Iterable[StepIds]) -> Generator[list[Batch], None, None]:
        """The micro-batches of each wanted step, in the order in which they are wanted.

        With workers, a few steps are taken ahead. Closing the iterator, or ending it, ends the workers.
        """
        if self.workers == 0:
            yield from map(self._pinned, map(self._step, wanted))
            return
        rest = iter(wanted)
        first = next(rest, None)
        if first is None:
            return
        self._require_shared_memory(first)
        ahead = iter(
            DataLoader(
                _Steps(self),
                batch_size=None,
                sampler=itertools.chain([first], rest),
                num_workers=self.workers,
                collate_fn=_as_it_is,
                # A fork knows the classes of the experiment file; another process could not import them. Linux forks by
                # default, but not in a process that was itself started in another way (`--launcher spawn`).
                multiprocessing_context="fork",
                worker_init_fn=_begin_worker,
                pin_memory=self.pin_memory,
                # Otherwise it draws from torch's global generator, whose state would then depend on the workers.
                generator=torch.Generator(),
            )
        )
        try:
            for step in ahead:
                if isinstance(step, UserError):
                    raise step
                yield step
        finally:
            end_loader_workers(ahead)

    def _require_shared_memory(self, step_ids: StepIds) -> None:
        """Raises UserError (4) where /dev/shm cannot hold what the workers prepare ahead: torch would crash or hang."""
        place = Path("/dev/shm")
        if not place.exists():
            return
        epoch, micro_batches = step_ids
        pages = [-(-tensor.nbytes // _PAGE) * _PAGE for tensor in tensors_of(self.fetch(epoch, micro_batches[0]))]
        needed = sum(pages) * len(micro_batches) * (_PREFETCHED * self.workers + 1) + _SEMAPHORES
        free = shutil.disk_usage(place).free
        if free < needed:
            raise UserError(
                f"/dev/shm has {_size(free)} free, {self.workers} loader processes need about {_size(needed)}: "
                "give the container more (shm_size: 1gb in compose.yaml, docker run --shm-size 1g), or use --workers 0",
                ExitCode.RESOURCES,
            )

    def _step(self, step_ids: StepIds) -> list[Batch]:
        epoch, micro_batches = step_ids
        return [self.fetch(epoch, ids) for ids in micro_batches]

    def _pinned(self, step: list[Batch]) -> list[Batch]:
        pinned: list[Batch] = map_tensors(Tensor.pin_memory, step) if self.pin_memory else step
        return pinned

    def _put_together(self, ids: Ids) -> Batch:
        """A micro-batch of a data set that is not ours, or for the experiment's own `collate`. Raises UserError."""
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


class _Steps(TorchDataset[list[Batch] | UserError]):
    """The loader as a data set whose index is a step's ids: so torch's DataLoader hands work to its processes."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __getitem__(self, step_ids: StepIds) -> list[Batch] | UserError:
        try:
            return self.loader._step(step_ids)
        except UserError as error:
            return error  # raised in a worker, it would arrive with the worker's traceback for a message


def _as_it_is(step: list[Batch] | UserError) -> list[Batch] | UserError:
    return step


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
