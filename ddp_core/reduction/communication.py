"""Exchanges between ranks in the background, on threads and a process group that nothing else uses."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.base.torch_internals import timeout_of

from .ordered_sum import OrderedSum

Job = Generator[None, None, Tensor]
"""An exchange that returns a tensor. It yields wherever its next phase may run beside the phases of other jobs."""


class CommunicationThreads:
    """Runs jobs first in, first out, each phase on a thread of its own, and completes one torch Future for each job.

    A chain of `Future.then` callbacks, as torch's PowerSGD hook uses, deadlocks on gloo with more than one bucket:
    the callbacks run on the very threads they wait for. Here nothing waits but these threads. A job with more phases
    than there are threads runs the rest on the last. After a failed job every later one fails with the same error, so
    that no rank waits for a peer that gave up. `device` is that of the tensors.
    """

    def __init__(self, name: str, count: int, device: torch.device) -> None:
        self._device = device
        self._queues: list[queue.SimpleQueue[_Item | None]] = [queue.SimpleQueue() for _ in range(count)]
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.error: Exception | None = None
        self._threads = [
            threading.Thread(target=self._work, args=(position,), name=name, daemon=True) for position in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, like: Tensor) -> torch.futures.Future[Tensor]:
        """Queue `job`, which may use what the calling thread has computed so far on `like`'s device."""
        future: torch.futures.Future[Tensor]
        if like.device.type == "cuda":
            future = torch.futures.Future(devices=[like.device])
            job = self._on_side_stream(job, like.device)
        else:
            future = torch.futures.Future()
        self._queues[0].put(_Item(job, future, like))
        return future

    def close(self, timeout: float = 5.0) -> bool:
        """End the threads after the jobs they have; say whether all ended within `timeout` seconds."""
        self._queues[0].put(None)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _on_side_stream(self, job: Job, device: torch.device) -> Job:
        # Not run on a machine with two CUDA devices yet.
        computed = torch.cuda.current_stream(device).record_event()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]

        def on_stream() -> Job:
            stream.wait_event(computed)
            return (yield from job)

        return on_stream()

    def _work(self, position: int) -> None:
        if self._device.type == "cuda":
            # A new thread starts on GPU 0, where every rank of the node would then hold some hundred megabytes.
            torch.cuda.set_device(self._device)
        following = self._queues[position + 1] if position + 1 < len(self._queues) else None
        while (item := self._queues[position].get()) is not None:
            # A failed or finished job must not be held here until the next one comes.
            if self._run_phase(item, to_the_end=following is None) and following is not None:
                following.put(item)
            del item
        if following is not None:
            following.put(None)

    def _run_phase(self, item: _Item, to_the_end: bool) -> bool:
        """Run the job up to its next yield, or to its end; return whether there is more to run."""
        job, future, like = item
        try:
            if self.error is not None:
                job.close()
                raise self.error
            # The future is completed on the stream too: that is where it records what its waiters wait for.
            with torch.cuda.stream(self._streams.get(like.device)), torch.no_grad():
                try:
                    next(job)
                    while to_the_end:
                        next(job)
                    return True
                except StopIteration as end:
                    future.set_result(end.value)
        except Exception as error:
            self.error = error
            # torch hands the exception object to DDP, which fails on it: the training thread looks at `error` then.
            future.set_exception(error)  # type: ignore[arg-type]
        return False


class _Item(NamedTuple):
    """A job, the future that its end completes, and a tensor on its device."""

    job: Job
    future: torch.futures.Future[Tensor]
    like: Tensor


def in_one_phase(work: Callable[[], Tensor]) -> Job:
    """A job without yields."""
    yield from ()
    return work()


class Channel:
    """Carries out jobs that exchange tensors with the other ranks of `group`; alone, each at once.

    `device` is that of the module, `timeout` how long a job waits for a silent rank (None: as long as `group` does),
    `nodes` the group's ranks, node by node (None: sums are made in one level), `phases` how many of a job's phases may
    run beside those of other jobs (None: as many as the sums have).
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        timeout: timedelta | None,
        nodes: Sequence[Sequence[int]] | None = None,
        phases: int | None = None,
    ) -> None:
        several = group is not None and group.size() > 1
        self.group = own_group(group, device, timeout) if group is not None and several else None
        self.device = device
        self.ordered_sum = OrderedSum(self.group, nodes)
        self.closed = False
        if phases is None:
            phases = OrderedSum.PHASES if self.ordered_sum.groups else 1
        if device.type != "cpu":
            # On one CUDA device, phases are queued one after another in any case.
            phases = 1
        self._threads = CommunicationThreads("exact-reduction", phases, device) if several else None

    @property
    def error(self) -> Exception | None:
        """What the first job raised that failed."""
        return self._threads.error if self._threads is not None else None

    def submit(self, job: Job, like: Tensor) -> torch.futures.Future[Tensor]:
        """Queue `job`, which may use what the calling thread has computed so far on `like`'s device."""
        if self._threads is not None:
            return self._threads.submit(job, like)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        with torch.no_grad():
            future.set_result(_drained(job))
        return future

    def sum(self, own: Sequence[Tensor], out: Tensor, micro_batches: int) -> None:
        """Sum flat tensors over ranks, as OrderedSum does; wait for it."""

        def job() -> Job:
            yield from self.ordered_sum.phases(own, out, micro_batches)
            return out

        self.submit(job(), out).wait()

    def close(self) -> None:
        """End the threads, then the process group, unless an error has already ended all groups."""
        self.closed = True
        if (self._threads is None or self._threads.close()) and self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
            self.group = None


def own_group(group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None) -> dist.ProcessGroup:
    """A process group of the same ranks for the communication thread alone: two threads' collectives must not mix."""
    ranks = dist.get_process_group_ranks(group)
    own = dist.new_group(
        ranks,
        # Not inherited by itself: a rank that is gone should be noticed here as soon as in the rest of the program.
        timeout=timeout or timeout_of(group, device),
        backend=dist.get_backend(group),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
        group_desc="exact reduction",
    )
    assert isinstance(own, dist.ProcessGroup)
    return own


def _drained(job: Job) -> Tensor:
    while True:
        try:
            next(job)
        except StopIteration as end:
            tensor: Tensor = end.value
            return tensor
