"""Collectives whose failure a process outlives, to go on in another group; and what that asks of NCCL.

The variables are those of torch's ProcessGroupNCCL.cpp as of 2.13. Not run between GPUs yet.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ddp_core.base.errors import UserError
from ddp_core.base.process import let_go
from ddp_core.distributed.process_group import ASKING_SECONDS, Collectives
from ddp_core.distributed.world import World
from ddp_core.live.member import Member
from ddp_core.live.members import store_at
from ddp_core.reduction.communication import CommunicationThreads

_STUCK_SECONDS = 300.0

SPARING: Mapping[str, str] = {
    # A thread of torch's, the watchdog, sees that a collective has failed. It ends NCCL's kernels, so that nothing
    # waits for them for ever, but not the process. What these kernels leave is rubbish, and never used: an update
    # follows only when all ranks' kernels have ended well (`await_step`). The default ends the process, a
    # minute later, when it may long have gone on in another group.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # The watchdog first waits for four times as many milliseconds, and so does whoever lets go of the group.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "25",
    # A failed group asks for its flight recorder, and then for the end of the processes: by a mark in the store that
    # all groups of a launch have in common, also the later ones, and by one in the process that is never taken back.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Without the watchdog nothing would see a failure. The waiting is ours, and asks for lost ranks meanwhile.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
"""Environment variables and their values; a group reads them when it is made. Other values would break the recovery."""


class LiveCollectives(Collectives):
    """What ranks send each other beside gradients, in one of the groups of a launch.

    `member`: this process's place among the members, which tells whether it is left behind, and is to make room.
    """

    runs_ahead = False  # `await_step` waits for each step
    takes_back = True
    waits_to_part = False  # the others wait for this rank

    def __init__(self, world: World, device: torch.device, member: Member) -> None:
        super().__init__(world, device)
        self._member = member
        self._threads: CommunicationThreads | None = None

    @property
    def is_left_behind(self) -> bool:
        return self._member.is_left_behind

    @property
    def makes_room(self) -> bool:
        return self._member.makes_room

    def to_successors(self, value: Callable[[], Any]) -> Any:
        return self.broadcast(value())

    def open_store(self, timeout: float) -> dist.Store:
        assert self.world.members_at is not None
        # One store serves all memberships of a launch, one after another.
        return dist.PrefixStore(f"membership/{self.world.membership}", store_at(self.world.members_at, timeout))

    def connecting(self, uses_nccl: bool) -> contextlib.AbstractContextManager[None]:
        """A block in which no process stays for ever, and in which groups are made that fail without ending it."""
        if not uses_nccl:
            return contextlib.nullcontext()
        os.environ.update(SPARING)
        return ended_if_stuck(self.world.place)

    def await_step(self, before: torch.cuda.Event | None, now: torch.cuda.Event) -> None:
        """Wait until every rank's device is done with this step: no update may follow an exchange that failed.

        That NCCL's kernels have ended here proves nothing by itself: where another rank aborts, it lets the kernels of
        its peers run to their end, on parts that it has never sent. See docs/explanation/recovery.md. Raises
        DistBackendError, and what gloo raises, where a rank is lost.
        """
        self.await_event(now)
        if self.uses_nccl:
            self.barrier()

    def when_left_behind(self, give_up: Callable[[Exception], None]) -> None:
        alive = weakref.WeakMethod(give_up)

        def watch() -> None:
            with contextlib.suppress(UserError):  # without the store nobody can go on in another group
                while not self.is_left_behind:
                    time.sleep(ASKING_SECONDS)
                    if alive() is None:
                        return
                if call := alive():
                    call(dist.DistBackendError("another rank was lost while this rank waited for a message"))

        threading.Thread(target=watch, name="left-behind", daemon=True).start()

    def call_collective(self, collective: Callable[[], object]) -> None:
        if self.uses_nccl:
            super().call_collective(collective)
            return
        if self._threads is None:
            self._threads = CommunicationThreads("collectives", 1, self.device)
            self.when_left_behind(self._threads.give_up)
        self._threads.call(collective)

    def cannot_abort(self) -> None:
        end_this_process(f"{self.world.place}: NCCL does not end, so this process does")

    def end(self) -> None:
        if self._threads is not None:
            self._threads.close()
            self._threads = None  # who looks whether this rank is left behind looks no more
        last: list[object] = [] if self.uses_nccl or self.is_abandoned else [dist.group.WORLD]
        super().end()
        if last:
            let_go(last)


@contextlib.contextmanager
def ended_if_stuck(place: str) -> Iterator[None]:
    """A block that ends this process where it takes five minutes: the launcher puts another one in its place.

    NCCL waits without a limit for the ranks that it connects, and nothing wakes it where one of them is gone.
    """
    why = f"{place}: NCCL does not connect, so this process ends"
    timer = threading.Timer(_STUCK_SECONDS, end_this_process, (why,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end_this_process(why: str) -> None:
    """End at once, as a process that is lost; nothing of it is waited for."""
    print(why, file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
