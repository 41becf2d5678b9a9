"""The rendezvous alone: a TCPStore in a process of its own, so that no node is special."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading

from ddp_core.base.errors import ExitCode, UserError, first_line
from ddp_core.distributed.addresses import listen_at, store_on

_START_SECONDS = 30
_CHECK_SECONDS = 3
_VALIDATE = struct.pack("=BI", 0, 0x3C85F7CE)
"""With these bytes a client of torch's TCPStore begins (QueryType::VALIDATE in TCPStoreBackend.hpp)."""
_PING = struct.pack("=BI", 13, 0x5A17)
"""QueryType::PING and any number, which the store sends back."""


def serve(port: int, bind: str | None = None) -> int:
    """Serve the store until SIGTERM or SIGINT, at one address of this machine or, where none is given, at every one."""
    # Whoever reaches the port can write to the store, and agents unpickle what they find there: private networks only.
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    _hurry_look_ups()
    address = None if bind is None else _address_of(bind)
    listening = listen_at(address, port, remedy="choose another with --port")
    # Torch takes seconds to load, and a port that is in use is told of before. Nodes that come meanwhile wait in the
    # socket's queue.
    from torch.distributed import DistError

    try:
        store = store_on(listening, _START_SECONDS)
    except DistError as error:
        reason = first_line(error)
        raise UserError(
            f"the store at port {port} did not start within {_START_SECONDS} s ({reason}); look at --port, at this "
            "machine's firewall, and whether its name servers answer",
            ExitCode.RESOURCES,
        ) from None
    print(f"rendezvous: listening on port {store.port} of {address or 'every address of this machine'}", flush=True)
    stop.wait()
    return ExitCode.DONE


def check(endpoint: str) -> int:
    """0 where a store answers at HOST:PORT within three seconds. Raises UserError (6) otherwise."""
    # It says to the store what a client of torch says first, without torch: a health check that loads torch takes two
    # seconds of a processor, which a busy machine does not have.
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--check {endpoint}: expected HOST:PORT")
    _hurry_look_ups()
    try:
        with socket.create_connection((host, int(port)), timeout=_CHECK_SECONDS) as connection:
            connection.sendall(_VALIDATE + _PING)
            answer = connection.recv(len(_PING) - 1, socket.MSG_WAITALL)
    except (OSError, OverflowError):
        answer = b""
    if answer != _PING[1:]:
        raise UserError(f"no rendezvous answers at {endpoint}", ExitCode.PEERS_LOST)
    return ExitCode.DONE


def _address_of(name: str) -> str:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        raise UserError(f"--bind {name}: nobody knows this name; give an address of this machine") from None
    # A name such as localhost may stand for one address of each kind; nodes try both.
    return str(min(found)[4][0])


def _hurry_look_ups() -> None:
    """Do not wait long for a name server: torch asks for the name of each address, for ten seconds if none answers."""
    # The variable stands for `options` in resolv.conf. Only these two commands set it, which look up nothing else.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
