"""Steps made before training asks for them: by a thread, and for CUDA on a stream beside the training's own."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from ddp_core.data.collating import Batch
from ddp_core.data.trees import Tree, map_tensors, tensors_of

Item = TypeVar("Item")
Made = TypeVar("Made")

AHEAD = 2
"""Steps that are made before they are asked for."""


def made_ahead(
    items: Iterable[Item], make: Callable[[Item], Made], begin: Callable[[], None] = lambda: None
) -> Generator[Made, None, None]:
    """`make(item)` of each item, in their sequence, called by one thread and AHEAD items before it is asked for.

    The caller's thread draws the items. `begin` is called once in the thread. What `make` raises is raised here, when
    that item's turn comes. Closing the generator waits for the `make` that is running, and calls no other.
    """
    threads = torch.get_num_threads()

    def start() -> None:
        # OpenMP keeps a number of threads for each Python thread, so every new thread must set its own.
        torch.set_num_threads(threads)
        begin()

    thread = ThreadPoolExecutor(1, "loader", initializer=start)
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


def brought_ahead(
    items: Iterable[Item],
    gather: Callable[[Item], Tree],
    finish: Callable[[Tree], list[Batch]],
    device: torch.device,
) -> Generator[list[Batch], None, None]:
    """The steps of the items on a CUDA device: gathered in host memory, copied and finished there, all of it ahead.

    Copies and `finish` run on a stream of their own. A step is handed over with the current stream waiting for it on
    the device, and without the host waiting. Not run on a GPU yet.

    Memory is reused only when nothing reads it any more. Pinned memory comes from torch's allocator, which keeps a
    block until the copies from it are done (ATen/core/CachingHostAllocator.h: `record_event`, called by
    `copy_kernel_cuda`). The finished tensors belong to the side stream's pool, and `record_stream` keeps each of them,
    however long somebody holds it, until the training stream has passed the place where it was let go.
    """
    side = torch.cuda.Stream(device)

    def bring(asked: tuple[Item, torch.cuda.Event]) -> tuple[list[Batch], torch.cuda.Event]:
        item, trained = asked
        host = map_tensors(Tensor.pin_memory, gather(item))
        # The host may issue many steps before the device has done one. Without this wait, the inputs of all of them
        # would lie in the device's memory.
        trained.synchronize()
        with torch.cuda.stream(side):
            step = finish(map_tensors(lambda tensor: tensor.to(device, non_blocking=True), host))
        return step, side.record_event()

    def asked() -> Generator[tuple[Item, torch.cuda.Event], None, None]:
        for item in items:
            trained = torch.cuda.Event(blocking=True)
            trained.record(torch.cuda.current_stream(device))
            yield item, trained

    with contextlib.closing(made_ahead(asked(), bring, lambda: torch.cuda.set_device(device))) as steps:
        for step, arrived in steps:
            training = torch.cuda.current_stream(device)
            training.wait_event(arrived)
            for tensor in tensors_of(step):
                tensor.record_stream(training)
            yield step
