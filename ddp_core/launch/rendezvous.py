"""The rendezvous alone: a TCPStore in a process of its own, so that no node is special."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta

from ddp_core.errors import ExitCode, UserError

_START_SECONDS = 30


def serve(port: int) -> int:
    """Serve the store, on every interface, until SIGTERM or SIGINT. Raises UserError (4) where it cannot be served.

    Whoever reaches the port can write to the store, and agents unpickle what they find there: private networks only.
    """
    from torch.distributed import DistError, TCPStore

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    _hurry_look_ups()
    try:
        # By this address the process reaches its own store. torch looks up the name of the address, for messages; every
        # machine knows the name of 127.0.0.1 without asking a name server.
        store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_START_SECONDS)
        )
    except DistError as error:
        if "EADDRINUSE" in str(error):
            raise UserError(f"port {port} is in use; choose another with --port", ExitCode.RESOURCES) from None
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"the store at port {port} did not start within {_START_SECONDS} s ({reason}); look at --port, at this "
            "machine's firewall, and whether its name servers answer",
            ExitCode.RESOURCES,
        ) from None
    print(f"rendezvous: listening on port {store.port}", flush=True)
    stop.wait()
    return ExitCode.DONE


def check(endpoint: str) -> int:
    """0 where a store answers at HOST:PORT within three seconds. Raises UserError (6) otherwise."""
    from torch.distributed import DistError, TCPStore

    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--check {endpoint}: expected HOST:PORT")
    _hurry_look_ups()
    try:
        store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=3))
        store.add("ddp/health", 1)
    except DistError:
        raise UserError(f"no rendezvous answers at {endpoint}", ExitCode.PEERS_LOST) from None
    return ExitCode.DONE


def _hurry_look_ups() -> None:
    """Do not wait long for a name server: torch asks for the name of each address, ten seconds where none answers.

    This is resolv.conf's `options`; only these two commands set it, which look up nothing else.
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
