"""Ends a node that can no longer reach the rendezvous.

torch's store has no time limit for an answer that never comes: a connection that is closed is noticed at once, but on a
node that is cut off from the network the agent would wait for ever, and its workers with it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

from ddp_core.base.errors import ExitCode

_PROBE_SECONDS = 2.0


@contextlib.contextmanager
def leaves_when_cut_off(endpoint: str | None, patience: float, end_workers: Callable[[], None]) -> Iterator[None]:
    """While in the block, ends this process with 6 when nothing answers at `endpoint` for `patience` seconds.

    `end_workers` is called before, from another thread.
    """
    if endpoint is None:
        yield
        return
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(endpoint, patience, end_workers, done), daemon=True)
    watch.start()
    try:
        yield
    finally:
        done.set()


def _watch(endpoint: str, patience: float, end_workers: Callable[[], None], done: threading.Event) -> None:
    answered = time.monotonic()
    while not done.wait(_PROBE_SECONDS):
        if _answers(endpoint):
            answered = time.monotonic()
        elif time.monotonic() - answered > patience and not done.is_set():
            print(
                f"ddp: error: the rendezvous at {endpoint} has not answered for {patience:.0f} s: this node is cut off "
                "and leaves; start it again when the network is back",
                file=sys.stderr,
                flush=True,
            )
            end_workers()
            os._exit(ExitCode.PEERS_LOST)


def _answers(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_PROBE_SECONDS):
            return True
    except OSError:
        return False
