"""Steps made before training asks for them: by worker processes, by a thread, and for CUDA on a stream of their own."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import shutil
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from ddp_core.base.determinism import one_thread
from ddp_core.base.errors import ExitCode, UserError, one_line
from ddp_core.base.process import die_with_parent
from ddp_core.base.refusals import MORE_SHARED_MEMORY, human_bytes, refusal, require_open_files
from ddp_core.base.torch_internals import end_loader_workers
from ddp_core.base.trees import Batch, StepIds, Tree, as_it_is, map_tensors, tensors_of
from ddp_core.base.user_code import LeftEarly, RaisedElsewhere, told, user_code

Item = TypeVar("Item")
Made = TypeVar("Made")

AHEAD = 2
"""Steps that the thread makes before they are asked for."""
LARGEST_STEP = 256 << 20
"""Bytes, as float32, up to which the inputs of a whole step lie ahead on the device: up to four steps lie there."""
_AHEAD_BY_WORKER = 2
"""Steps that torch has each worker process make before they are asked for, its default."""
_PAGE = 4096
_SEMAPHORES = 2**18
"""Bytes of shared memory for the workers' queues, generously."""
_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which a terminal, a scheduler or a launcher asks a process to stop."""


def made_by_workers(
    wanted: Iterable[StepIds], make: Callable[[StepIds], Made], workers: int
) -> Generator[Made, None, None]:
    """What `make` returns for each wanted step, made by worker processes, which end with the generator.

    Raises UserError (4) where /dev/shm has no room for what the workers make ahead.
    """
    rest = iter(wanted)
    first = next(rest, None)
    if first is None:
        return
    _require_shared_memory(first, make, workers)
    loader = DataLoader(
        _Steps(make),
        batch_size=None,
        sampler=itertools.chain([first], rest),
        num_workers=workers,
        collate_fn=as_it_is,
        # A fork knows the classes of the experiment file; another process could not import them. Linux forks by
        # default, but not in a process that was itself started in another way.
        multiprocessing_context="fork",
        worker_init_fn=_begin_worker,
        # Otherwise it draws from torch's global generator, whose state would then depend on the workers.
        generator=torch.Generator(),
    )
    others = set(multiprocessing.active_children())
    try:
        ahead = iter(loader)
    except BaseException:
        # Python would wait for those processes that were started, when it ends.
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
            process.join()
        raise
    try:
        while True:
            # What a data set raises in a worker is raised here.
            with user_code("your data set"):
                try:
                    step = next(ahead, None)
                except RuntimeError as error:
                    # torch tells no signal where it has not seen the end of a process itself.
                    said = f"{error} {error.__cause__}"
                    is_unseen = "exited unexpectedly" in said and "by signal" not in said
                    if "is killed by signal: Killed" not in said and not is_unseen:
                        raise
                    raise UserError(
                        "a loader process was killed (SIGKILL), as the kernel does where memory runs out: use fewer "
                        "--workers, or give this machine or container more memory",
                        ExitCode.RESOURCES,
                    ) from None
            if step is None:
                break
            if isinstance(step, Exception):
                raise step
            made: Made = ForkingPickler.loads(step)
            yield made
    finally:
        end_loader_workers(ahead)


def _require_shared_memory(step_ids: StepIds, make: Callable[[StepIds], object], workers: int) -> None:
    """Raise UserError (4) where /dev/shm cannot hold what the workers make ahead: torch would crash or hang."""
    place = Path("/dev/shm")
    if not place.exists():
        return
    epoch, micro_batches = step_ids[:2]
    tensors = list(tensors_of(make((epoch, micro_batches[:1]))))
    # torch sends each tensor as an open file.
    ahead = _AHEAD_BY_WORKER * workers + 1
    require_open_files(2, workers, len(tensors) * len(micro_batches) * ahead)
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
    pages = [-(-tensor.nbytes // _PAGE) * _PAGE for tensor in dense]
    needed = sum(pages) * len(micro_batches) * ahead + _SEMAPHORES
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UserError(
            f"/dev/shm has {human_bytes(free)} free, {workers} loader processes need about {human_bytes(needed)}: "
            f"{MORE_SHARED_MEMORY}",
            ExitCode.RESOURCES,
        )


class _Steps(TorchDataset[bytes | Exception]):
    """What `make` returns, as a data set whose index is a step's ids: so torch's DataLoader hands it to processes."""

    def __init__(self, make: Callable[[StepIds], object]) -> None:
        self.make = make

    def __getitem__(self, step_ids: StepIds) -> bytes | Exception:
        # What is raised in a worker would arrive with the worker's traceback for a message.
        try:
            step = self.make(step_ids)
        except (UserError, LeftEarly) as error:
            return error
        except Exception as error:
            return refusal(error) or RaisedElsewhere(told(error))
        try:
            # Otherwise a thread of the queue packs it, which tells nobody where it cannot.
            return bytes(ForkingPickler.dumps(step))
        except Exception as error:
            return refusal(error) or UserError(
                f"your data set returns what a loader process cannot send ({type(error).__name__}: {one_line(error)}); "
                "let it return tensors without a gradient's history, arrays and plain values, or use --workers 0"
            )


def _begin_worker(_: int) -> None:
    """Let the training process decide what a request to stop means, and do not outlive it.

    A terminal, a scheduler and torchrun send their request to every process, but a step that is to be finished needs
    its data. torch's own worker looks for its parent between two steps only, so a worker that hangs inside a data set
    would stay for ever.
    """
    for number in _REQUESTS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()


def made_ahead(
    items: Iterable[Item], make: Callable[[Item], Made], device: torch.device | None = None
) -> Generator[Made, None, None]:
    """`make(item)` of each item, in their sequence, called by one thread and AHEAD items before it is asked for.

    The caller's thread draws the items. The thread works on `device`. What `make` raises is raised here, when that
    item's turn comes. Closing the generator waits for the `make` that is running, and calls no other.
    """
    thread = one_thread("loader", device)
    begun: deque[Future[Made]] = deque()
    try:
        for item in items:
            begun.append(thread.submit(make, item))
            if len(begun) > AHEAD:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        thread.shutdown(cancel_futures=True)


class OnDemand(Sequence[Batch]):
    """The micro-batches of a step: `make` makes each from what lies in host memory whenever it is taken."""

    def __init__(self, host: Sequence[Tree], make: Callable[[Tree], Batch]) -> None:
        self._host, self._make = host, make

    def __len__(self) -> int:
        return len(self._host)

    def __getitem__(self, place: Any) -> Any:
        taken = self._host[place]
        return OnDemand(taken, self._make) if isinstance(place, slice) else self._make(taken)


def brought_ahead(
    items: Iterable[Item],
    gather: Callable[[Item], Sequence[Tree]],
    finish: Callable[[Tree], Batch],
    device: torch.device,
) -> Generator[Sequence[Batch], None, None]:
    """The steps of the items on a CUDA device: gathered in host memory, copied and finished there, all of it ahead.

    `gather` gives the micro-batches of a step, and `finish` makes one of them ready on the device. Copies and `finish`
    run on a stream of their own. When a step is yielded, the current stream waits for it on the device; the host does
    not. Where a step is larger than LARGEST_STEP, for example because it has many micro-batches, each micro-batch is
    copied and finished when it is taken.

    Memory is reused only when nothing reads it any more. Pinned memory comes from torch's allocator, which keeps a
    block until the copies from it are done (ATen/core/CachingHostAllocator.h: `record_event`, called by
    `copy_kernel_cuda`). The finished tensors belong to the side stream's pool, and `record_stream` keeps each of them,
    however long somebody holds it, until the training stream has passed the place where it was let go.
    """
    side = torch.cuda.Stream(device)

    def moved(micro_batch: Tree) -> Batch:
        return finish(map_tensors(lambda tensor: tensor.to(device, non_blocking=True), micro_batch))

    def bring(asked: tuple[Item, torch.cuda.Event]) -> tuple[Sequence[Batch], torch.cuda.Event]:
        item, trained = asked
        host: list[Tree] = map_tensors(Tensor.pin_memory, list(gather(item)))
        if sum(tensor.numel() * max(4, tensor.element_size()) for tensor in tensors_of(host)) > LARGEST_STEP:
            return OnDemand(host, moved), trained
        # The host may issue many steps before the device has done one. Without this wait, the inputs of all of them
        # would lie in the device's memory.
        trained.synchronize()
        with torch.cuda.stream(side):
            step = [moved(micro_batch) for micro_batch in host]
        return step, side.record_event()

    def asked() -> Generator[tuple[Item, torch.cuda.Event], None, None]:
        for item in items:
            trained = torch.cuda.Event(blocking=True)
            trained.record(torch.cuda.current_stream(device))
            yield item, trained

    with contextlib.closing(made_ahead(asked(), bring, device)) as steps:
        for step, arrived in steps:
            training = torch.cuda.current_stream(device)
            training.wait_event(arrived)
            if not isinstance(step, OnDemand):
                for tensor in tensors_of(step):
                    tensor.record_stream(training)
            yield step
