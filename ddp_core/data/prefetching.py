"""Steps made before training asks for them: by a thread, and for CUDA on a stream beside the training's own."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from ddp_core.base.determinism import one_thread
from ddp_core.data.collating import Batch
from ddp_core.data.trees import Tree, map_tensors, tensors_of

Item = TypeVar("Item")
Made = TypeVar("Made")

AHEAD = 2
"""Steps that are made before they are asked for."""
LARGEST_STEP = 256 << 20
"""Bytes, as float32, up to which the inputs of a whole step lie ahead on the device: up to four steps lie there."""


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
    """The micro-batches of a step: each is made by `make`, from what lies in host memory, whenever it is taken."""

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
    run on a stream of their own. A step is handed over with the current stream waiting for it on the device, and
    without the host waiting. Of a step larger than LARGEST_STEP, which many micro-batches may make up, each micro-batch
    is copied and finished when it is taken. Not run on a GPU yet.

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
