"""Exchanges between ranks in the background, on threads and a process group that nothing else uses."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.base.process import let_go
from ddp_core.base.torch_internals import timeout_of

from .exchange import carries_host_memory
from .ordered_sum import OrderedSum

Transfer = Generator[None, None, Tensor]
"""Work that exchanges tensors with other ranks and returns a tensor.

It yields between two phases, wherever the next one may run beside the phases of other transfers.
"""
_Item = tuple[Transfer, torch.futures.Future[Tensor], torch.device]
"""A transfer, the future that its end completes, and the device of its tensors."""


class CommunicationThreads:
    """Runs transfers first in, first out: the first phase of each on the first thread, the second on the second, …

    A transfer with more phases than there are threads runs the rest on the last. Each completes a torch Future. (A
    chain of `Future.then` callbacks, as torch's PowerSGD hook uses, deadlocks on gloo with more than one bucket: the
    callbacks run on the very threads they wait for. Here nothing waits but these threads.) After a failed transfer
    every later one fails with the same error, so that no rank waits for a peer that gave up. `device` is that of the
    tensors.
    """

    def __init__(self, name: str, count: int, device: torch.device) -> None:
        self._device = device
        self._queues: list[queue.SimpleQueue[_Item | None]] = [queue.SimpleQueue() for _ in range(count)]
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._awaited: set[torch.futures.Future[Tensor]] = set()
        self._ending = threading.RLock()
        self._given_up: Exception | None = None
        self.error: Exception | None = None
        self._threads = [
            threading.Thread(target=self._work, args=(position,), name=name, daemon=True) for position in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, transfer: Transfer, like: Tensor) -> torch.futures.Future[Tensor]:
        """Queue `transfer`, which may use what the calling thread has computed so far on `like`'s device."""
        future = _future_on(like.device)
        if like.device.type == "cuda":
            transfer = self._on_side_stream(transfer, like.device)
        with self._ending:
            self._awaited.add(future)
            if self._given_up is None:
                self._queues[0].put((transfer, future, like.device))
            else:  # the threads may wait for ever
                self._complete(future, self._given_up)
        return future

    def call(self, collective: Callable[[], object]) -> None:
        """Run this function as a transfer, and wait for its end."""
        done = torch.empty(0)

        def work() -> Tensor:
            collective()
            return done

        self.submit(in_last_phase(work), done).wait()

    def give_up(self, error: Exception) -> None:
        """Let all transfers fail with this error now, also those whose thread waits for a message."""
        with self._ending:
            self.error = self._given_up = self.error or error
            for future in list(self._awaited):
                self._complete(future, self._given_up)

    def close(self, timeout: float = 5.0) -> bool:
        """End the threads after the transfers they have; say whether all ended within `timeout` seconds.

        Nobody waits for transfers that were given up, and only a moment for threads that have none.
        """
        self._queues[0].put(None)
        deadline = time.monotonic() + (timeout if self._given_up is None else 0.1)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _on_side_stream(self, transfer: Transfer, device: torch.device) -> Transfer:
        # Not run on a machine with two CUDA devices yet.
        computed = torch.cuda.current_stream(device).record_event()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]

        def on_stream() -> Transfer:
            stream.wait_event(computed)
            return (yield from transfer)

        return on_stream()

    def _work(self, position: int) -> None:
        if self._device.type == "cuda":
            # A new thread starts on GPU 0, where every rank of the node would then hold some hundred megabytes.
            torch.cuda.set_device(self._device)
        following = self._queues[position + 1] if position + 1 < len(self._queues) else None
        while (item := self._queues[position].get()) is not None:
            # A failed or finished transfer must not be held here until the next one comes.
            if self._run_phase(item, to_the_end=following is None) and following is not None:
                following.put(item)
            del item
        if following is not None:
            following.put(None)

    def _run_phase(self, item: _Item, to_the_end: bool) -> bool:
        """Run the transfer up to its next yield, or to its end; return whether there is more to run."""
        transfer, future, device = item
        try:
            if self.error is not None:
                transfer.close()
                raise self.error
            # The future is completed on the stream too: that is where it records what its waiters wait for.
            with torch.cuda.stream(self._streams.get(device)), torch.no_grad():
                try:
                    next(transfer)
                    while to_the_end:
                        next(transfer)
                    return True
                except StopIteration as end:
                    self._complete(future, end.value)
        except Exception as error:
            self.error = self.error or error
            self._complete(future, error)
        return False

    def _complete(self, future: torch.futures.Future[Tensor], end: Tensor | Exception) -> None:
        """Complete the future with the transfer's result or error, unless that was done before."""
        with self._ending:
            if future not in self._awaited:
                return
            if isinstance(end, Exception):
                # torch gives DDP the exception in the place of a tensor, on which DDP fails; the training thread then
                # raises `error`.
                future.set_exception(end)  # type: ignore[arg-type]
            else:
                future.set_result(end)
            self._awaited.remove(future)


def in_last_phase(work: Callable[[], Tensor]) -> Transfer:
    """A transfer that returns what `work` returns, which is done when all earlier transfers have ended."""
    for _ in range(OrderedSum.PHASES - 1):
        yield
    return work()


class Channel:
    """Runs transfers between the ranks of `group`, on a thread for each phase; for one rank alone, each at once.

    `device` is that of the module, `timeout` how long a transfer waits for a silent rank (None: as long as `group`
    does), `nodes` and `parts` are those of `OrderedSum`, `threads` how many phases may run at the same time, each of
    another transfer (None: as many as the sums have).
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        timeout: timedelta | None,
        nodes: Sequence[Sequence[int]] | None = None,
        parts: tuple[int, ...] = (),
        threads: int | None = None,
    ) -> None:
        several = group is not None and group.size() > 1
        self.group = own_group(group, device, timeout) if group is not None and several else None
        self.device = device
        self._use(OrderedSum(self.group, nodes, parts))
        self.closed = False
        if threads is None:
            threads = OrderedSum.PHASES if self.ordered_sum.groups else 1
        if device.type != "cpu":
            # On one CUDA device, phases are queued one after another in any case.
            threads = 1
        self.threads = threads
        """So many transfers are under way at a time."""
        self._threads = CommunicationThreads("exact-reduction", threads, device) if several else None

    def _use(self, ordered_sum: OrderedSum) -> None:
        self.ordered_sum = ordered_sum
        self.by_parts = ordered_sum.parts_on(self.device)
        """How tensors on the device are summed of which each rank gets its part."""

    @property
    def error(self) -> Exception | None:
        """What the first transfer that failed has raised."""
        return self._threads.error if self._threads is not None else None

    def submit(self, transfer: Transfer, like: Tensor) -> torch.futures.Future[Tensor]:
        """See `CommunicationThreads.submit`."""
        if self._threads is not None:
            if self.closed:
                raise closed()
            return self._threads.submit(transfer, like)
        future = _future_on(like.device)
        with torch.no_grad():
            try:
                while True:
                    next(transfer)
            except StopIteration as end:
                future.set_result(end.value)
        return future

    def sum(self, own: Sequence[Tensor], out: Tensor, micro_batches: int) -> None:
        """Sum flat tensors over ranks, as OrderedSum does; wait for it."""

        def transfer() -> Transfer:
            yield from self.ordered_sum.phases(own, out, micro_batches)
            return out

        self.submit(transfer(), out).wait()

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """The largest of all ranks, for each of these numbers from 0 to 255; a collective of a group of several ranks.

        In host memory where the group can, so that the host waits for no CUDA device.
        """
        group = self.group
        if group is None:
            raise closed()
        device = torch.device("cpu") if carries_host_memory(group) else self.device
        found = torch.tensor(numbers, dtype=torch.uint8, device=device)

        def reduce() -> Tensor:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
            return found

        self.submit(in_last_phase(reduce), found).wait()
        return found.tolist()

    def give_up(self, error: Exception) -> None:
        """See `ExactReduction.give_up`."""
        if self._threads is not None:
            self._threads.give_up(error)

    def close(self, waits: bool = True) -> None:
        """End the threads, then the process group, unless an error has already ended all groups.

        Nothing holds the group any longer: its threads, if it is one of gloo, run until nobody does. On a CPU a thread
        drops the group where nobody `waits` for its connections to close.
        """
        self.closed = True
        if (self._threads is None or self._threads.close()) and self.group is not None and dist.is_initialized():
            last: list[object] = [self.group]
            dist.destroy_process_group(self.group)
            self.group = None
            self._use(OrderedSum(None))
            if not waits and self.device.type == "cpu":
                let_go(last)


def closed() -> RuntimeError:
    """The error for an exchange after the end."""
    return RuntimeError("this reduction was closed: make another one to train on")


def _future_on(device: torch.device) -> torch.futures.Future[Tensor]:
    """A future for a tensor on this device: torch refuses a result on a device that its future was not made for."""
    return torch.futures.Future(devices=[] if device.type == "cpu" else [device])


def own_group(group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None = None) -> dist.ProcessGroup:
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
