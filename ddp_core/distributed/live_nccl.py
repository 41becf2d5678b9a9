"""What a live recovery asks of NCCL and torch's threads beside it: that they spare the ranks which go on.

The variables are those of torch's ProcessGroupNCCL.cpp as of 2.13. Not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping

_STUCK_SECONDS = 300.0

SPARING: Mapping[str, str] = {
    # A thread of torch's, the watchdog, sees that a collective has failed. It ends NCCL's kernels, so that nothing
    # waits for them for ever, but not the process. What these kernels leave is rubbish, and never used: an update
    # follows only when all ranks' kernels have ended well (`Collectives.await_all`). The default ends the process, a
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


def let_watchdogs_spare() -> None:
    """Let the groups of this process that are made from here on fail without ending the process."""
    os.environ.update(SPARING)


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
