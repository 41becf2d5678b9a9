"""A process group whose ranks are threads of one process: tests of sums take milliseconds.

A message goes over when both sides have asked for it, and is read at that time, as with gloo: a tensor that is
overwritten before it was sent arrives with the wrong values.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

SECONDS = 60
"""After which a message is taken never to come."""


class Work:
    """A message that is under way."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.done, self.was_awaited = tensor, threading.Event(), False

    def wait(self) -> None:
        """Until it has gone over; once, since gloo's work would then wait for a second message."""
        assert not self.was_awaited
        self.was_awaited = True
        if not self.done.wait(SECONDS):
            raise RuntimeError("a message never came")


class Wires:
    """The messages of a group that one side has asked for."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: dict[tuple[str, int, int, int], deque[Work]] = defaultdict(deque)
        self.works: list[Work] = []
        self.sent: list[tuple[int, int, int]] = []
        """Sender, receiver and bytes of all messages so far."""
        self._objects: dict[tuple[int, int], queue.Queue[Any]] = defaultdict(queue.Queue)

    def objects(self, sender: int, receiver: int) -> queue.Queue[Any]:
        """The objects on their way from one rank to another."""
        with self.lock:  # else two threads may make two queues
            return self._objects[sender, receiver]

    def ask(self, side: str, sender: int, receiver: int, tag: int, tensor: Tensor) -> Work:
        """Start to `send` or `receive`."""
        work, other = Work(tensor), {"send": "receive", "receive": "send"}[side]
        with self.lock:
            self.works.append(work)
            if side == "send":
                self.sent.append((sender, receiver, tensor.numel() * tensor.element_size()))
            if partners := self.waiting[other, sender, receiver, tag]:
                partner = partners.popleft()
                source, target = (work, partner) if side == "send" else (partner, work)
                assert source.tensor.shape == target.tensor.shape
                target.tensor.copy_(source.tensor)
                work.done.set()
                partner.done.set()
            else:
                self.waiting[side, sender, receiver, tag].append(work)
        return work

    def nothing_is_left(self) -> bool:
        """Whether each message had both sides, and both have waited for it."""
        return not any(self.waiting.values()) and all(work.was_awaited for work in self.works)


class ThreadGroup:
    """One rank's side of a group."""

    def __init__(self, wires: Wires, rank: int, size: int, others: Wires | None = None) -> None:
        self.wires, self._rank, self._size, self._others = wires, rank, size, others
        self.asked: tuple[Any, ...] = ()

    def own(self, *asked: Any) -> ThreadGroup:
        """A group of the same ranks whose messages do not mix with those of this one."""
        assert self._others is not None
        found = ThreadGroup(self._others, self._rank, self._size)
        found.asked = asked
        return found

    def rank(self) -> int:
        """As of a process group."""
        return self._rank

    def size(self) -> int:
        """As of a process group."""
        return self._size

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """As of a process group."""
        return self.wires.ask("send", self._rank, peer, tag, tensors[0])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """As of a process group."""
        return self.wires.ask("receive", peer, self._rank, tag, tensors[0])


def at_once(phases: Generator[None, None, Any]) -> Any:
    """Run phases to their end; return what they return."""
    while True:
        try:
            next(phases)
        except StopIteration as end:
            return end.value


def _all_gather_object(found: list[Any], own: object, group: ThreadGroup) -> None:
    for peer in range(group.size()):
        group.wires.objects(group.rank(), peer).put(own)
    for peer in range(group.size()):
        found[peer] = group.wires.objects(peer, group.rank()).get(timeout=SECONDS)


def _all_reduce(found: Tensor, op: object, group: ThreadGroup) -> None:
    everyones: list[Any] = [None] * group.size()
    _all_gather_object(everyones, found.clone(), group)
    found.copy_(torch.stack(everyones).amax(0))


def _message(operation: str, tensor: Tensor, group: ThreadGroup, group_peer: int) -> Callable[[], Work]:
    assert tensor.numel()
    assert group_peer != group.rank()
    return lambda: getattr(group, operation)([tensor], group_peer, -2)


def _batch(messages: Sequence[Callable[[], Work]]) -> list[Work]:
    assert messages
    return [message() for message in messages]


COLLECTIVES = SimpleNamespace(
    isend="send",
    irecv="recv",
    P2POp=_message,
    batch_isend_irecv=_batch,
)
"""What `ddp_core.reduction.exchange` takes from torch.distributed."""


def use_threads(patch: pytest.MonkeyPatch, backend: str = "gloo") -> None:
    """From now on exchanges are those of this backend, and collective operations work on groups of threads."""
    patch.setattr(
        "ddp_core.reduction.exchange._backend", lambda group, device: backend if group.size() and device.type else ""
    )
    patch.setattr("ddp_core.reduction.exchange.dist", COLLECTIVES)
    patch.setattr("ddp_core.reduction.agreement.dist", SimpleNamespace(all_gather_object=_all_gather_object))
    patch.setattr("ddp_core.reduction.communication.carries_host_memory", lambda _: True)
    patch.setattr("ddp_core.reduction.communication.own_group", ThreadGroup.own)


def on_threads(world_size: int, function: Callable[[Any], Any]) -> list[Any]:
    """Call `function(group)` on each rank of a new group, and return the results by rank; all messages must arrive."""
    wires, others = Wires(), Wires()
    with ThreadPoolExecutor(world_size) as threads:
        groups = [ThreadGroup(wires, rank, world_size, others) for rank in range(world_size)]
        found = list(threads.map(function, groups))
    assert wires.nothing_is_left()
    assert others.nothing_is_left()
    return found


GATHERS: list[Any] = []
"""The device and the timeout of each group that was asked for to gather parameters."""


def on_thread_world(world_size: int, function: Callable[[Any], Any]) -> list[Any]:
    """Call `function(group)` on each rank of a new group; the results by rank, or the error of the first that fails.

    What torch does with a group runs for real, as in its own tests, so that `fully_shard` and its collectives work; our
    messages between two ranks, which that group does not have, go over wires. All ranks draw from one random generator:
    make models before.
    """
    from torch._C._distributed_c10d import _set_thread_isolation_mode
    from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup, ThreadLocalWorld

    store, wires = dist.HashStore(), Wires()
    ends = SimpleNamespace(is_initialized=lambda: True, destroy_process_group=lambda _: None)
    ends.all_reduce, ends.ReduceOp = _all_reduce, dist.ReduceOp

    def own_group(group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None) -> Any:
        own = ThreadGroup(wires, group.rank(), group.size())
        own.asked = (device, timeout)
        return own

    def run(rank: int) -> Any:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            return function(dist.group.WORLD)
        except BaseException as error:
            # The others, which wait for this rank, end with SystemExit.
            ProcessLocalGroup.exception_handle(error)
            raise
        finally:
            dist.destroy_process_group()

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(world_size) as threads:
        patch.setattr(dist.distributed_c10d, "_world", ThreadLocalWorld())
        patch.setattr("ddp_core.reduction.communication.own_group", own_group)
        patch.setattr("ddp_core.reduction.communication.dist", ends)
        # Gathers of parameters need no group of their own where all of a rank's collectives are called by its thread.
        patch.setattr("ddp_core.sharding.rows.own_group", lambda group, *asked: GATHERS.append(asked) or group)
        patch.setattr("ddp_core.sharding.rows.gather_by_messages", lambda *_: None)
        patch.setattr("ddp_core.reduction.exchange._backends", lambda _: {"cpu": "gloo"})
        _set_thread_isolation_mode(True)
        ProcessLocalGroup.reset()
        try:
            futures = [threads.submit(run, rank) for rank in range(world_size)]
            errors = [error for future in futures if (error := future.exception()) is not None]
        finally:
            _set_thread_isolation_mode(False)
        if errors:
            raise next((error for error in errors if isinstance(error, Exception)), errors[0])
        assert wires.nothing_is_left()
        return [future.result() for future in futures]
