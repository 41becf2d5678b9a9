"""The rendezvous alone: a TCPStore in a process of its own, so that no node is special."""

from __future__ import annotations

import signal
import threading
from datetime import timedelta

from ddp_core.errors import ExitCode, UserError


def serve(port: int, host: str = "0.0.0.0") -> int:
    """Serve the store until SIGTERM or SIGINT. Raises UserError (4) where the port is taken.

    Whoever reaches the port can write to the store, and agents unpickle what they find there: private networks only.
    """
    from torch.distributed import DistError, TCPStore

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    except DistError:
        raise UserError(f"port {port} is in use; choose another with --port", ExitCode.RESOURCES) from None
    print(f"rendezvous: listening on port {store.port}", flush=True)
    stop.wait()
    return ExitCode.DONE


def check(endpoint: str) -> int:
    """0 where a store answers at HOST:PORT within three seconds. Raises UserError (6) otherwise."""
    from torch.distributed import DistError, TCPStore

    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--check {endpoint}: expected HOST:PORT")
    try:
        store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=3))
        store.add("ddp/health", 1)
    except DistError:
        raise UserError(f"no rendezvous answers at {endpoint}", ExitCode.PEERS_LOST) from None
    return ExitCode.DONE
