"""Exchanges between ranks in the background: one thread, and a process group of its own that only this thread uses."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.torch_internals import timeout_of

from .ordered_sum import OrderedSum


class CommunicationThread:
    """Runs jobs first in, first out, and completes one torch Future for each.

    A chain of `Future.then` callbacks, as torch's PowerSGD hook uses, deadlocks on gloo with more than one bucket:
    the callbacks run on the very threads they wait for. Here nothing waits but this thread. After a failed job every
    later one fails with the same error, so that no rank waits for a peer that gave up.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Tensor], torch.futures.Future[Tensor], Tensor] | None]
        self._jobs = queue.SimpleQueue()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Tensor], like: Tensor) -> torch.futures.Future[Tensor]:
        """Queue `job`, which may use what the calling thread has computed so far on `like`'s device."""
        future: torch.futures.Future[Tensor]
        if like.device.type == "cuda":
            future = torch.futures.Future(devices=[like.device])
            self._jobs.put((self._on_side_stream(job, like.device), future, like))
        else:
            future = torch.futures.Future()
            self._jobs.put((job, future, like))
        return future

    def close(self, timeout: float = 5.0) -> bool:
        """End the thread after the jobs it has; say whether it ended within `timeout` seconds."""
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _on_side_stream(self, job: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
        # Not run on a machine with two CUDA devices yet.
        computed = torch.cuda.current_stream(device).record_event()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]

        def on_stream() -> Tensor:
            stream.wait_event(computed)
            return job()

        return on_stream

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future, like = item
            stream = self._streams.get(like.device)
            try:
                if self.error is not None:
                    raise self.error
                # The future is completed on the stream too: that is where it records what its waiters wait for.
                with torch.cuda.stream(stream), torch.no_grad():
                    future.set_result(job())
            except Exception as error:
                self.error = error
                # torch hands the exception object to DDP, which fails on it: the training thread looks at `error` then.
                future.set_exception(error)  # type: ignore[arg-type]
            del item, job, future, like


class Channel:
    """Carries out jobs that exchange tensors with the other ranks of `group`; alone, each at once.

    `device` is that of the module, `timeout` how long a job waits for a silent rank (None: as long as `group` does).
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout: timedelta | None) -> None:
        several = group is not None and group.size() > 1
        self.group = _own_group(group, device, timeout) if group is not None and several else None
        self.device = device
        self.ordered_sum = OrderedSum(self.group)
        self.closed = False
        self._thread = CommunicationThread("exact-reduction") if several else None

    @property
    def error(self) -> Exception | None:
        """What the first job raised that failed."""
        return self._thread.error if self._thread is not None else None

    def submit(self, job: Callable[[], Tensor], like: Tensor) -> torch.futures.Future[Tensor]:
        """Queue `job`, which may use what the calling thread has computed so far on `like`'s device."""
        if self._thread is not None:
            return self._thread.submit(job, like)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        with torch.no_grad():
            future.set_result(job())
        return future

    def sum(self, own: Sequence[Tensor], out: Tensor, micro_batches: int) -> None:
        """Sum flat tensors over ranks, as OrderedSum does; wait for it."""

        def job() -> Tensor:
            self.ordered_sum(own, out, micro_batches)
            return out

        self.submit(job, out).wait()

    def close(self) -> None:
        """End the thread, then the process group."""
        self.closed = True
        if (self._thread is None or self._thread.close()) and self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None


def _own_group(group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None) -> dist.ProcessGroup:
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
