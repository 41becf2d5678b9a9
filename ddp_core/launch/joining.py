"""How this node joins the others: the address that it gives them, and torch's rendezvous with settings that were tried.

Keep-alives are short, nodes are known by address and not by host name, and a lost rendezvous is one error of its own.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.torch_internals import end_keep_alives
from ddp_core.distributed.addresses import address_served, address_towards, listen_at, names_loopback, store_on

_ANSWER_SECONDS = 10
_ENDING_SECONDS = 2.0
_READ_SECONDS = 30
_LOOPBACK = "127.0.0.1"
_ELSEWHERE = "192.0.2.1"
"""An address that no machine has (RFC 5737)."""


class RendezvousLost(UserError):
    """The store that the nodes meet at is gone; another launch may find it again."""

    def __init__(self, endpoint: str | None, error: BaseException) -> None:
        reason = str(error).strip().partition("\n")[0]
        super().__init__(f"the rendezvous at {endpoint} is lost ({reason})", ExitCode.PEERS_LOST)


def join(
    endpoint: str | None,
    launch_id: str,
    nnodes: tuple[int, int],
    address: str,
    join_seconds: int,
    is_host: bool = False,
) -> RendezvousHandler:
    """Reach the place where the nodes of this launch meet; as the host, or with no endpoint, make that place here.

    `nnodes`: how many may take part, at least and at most. `join_seconds`: how long to wait for the least, and for the
    host. Raises RendezvousLost.
    """
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=endpoint or "",
        run_id=launch_id,
        min_nodes=nnodes[0],
        max_nodes=nnodes[1],
        local_addr=address,
        join_timeout=join_seconds,
        last_call_timeout=2,
        keep_alive_interval=1,
        keep_alive_max_attempt=3,
    )
    try:
        store = _store(endpoint, is_host)
        return create_handler(store, C10dRendezvousBackend(store, launch_id), parameters)
    except (RendezvousError, DistError) as error:
        raise RendezvousLost(endpoint, error) from None


@contextlib.contextmanager
def ends_keep_alives(handler: RendezvousHandler) -> Iterator[None]:
    """After the block, no thread of this process talks to the rendezvous any more, which stays open for other nodes.

    A thread that waits for the store's answer while the interpreter ends aborts the process, and its exit code is lost.
    """
    try:
        yield
    finally:
        end_keep_alives(handler, _ENDING_SECONDS)


def _store(endpoint: str | None, is_host: bool) -> TCPStore:
    """The store that the nodes meet at: served here, or reached. Raises UserError (4) where the port is in use."""
    if endpoint is None:
        return store_on(listen_at(_LOOPBACK, 0), _READ_SECONDS)
    host, _, port = endpoint.rpartition(":")
    if is_host:
        remedy = "give another with --rdzv-endpoint"
        return store_on(listen_at(address_served(host), int(port), remedy=remedy), _READ_SECONDS)
    _await_answer(endpoint)
    return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=_READ_SECONDS))


def own_address(endpoint: str | None, is_host: bool = False) -> str:
    """The address by which peers reach this node: the one that it would use towards the rendezvous.

    The host of the rendezvous may know its own name as a loopback address, as Debian does: it takes the address that it
    would use towards another network, if there is any.

    Raises UserError (2) where the endpoint is not HOST:PORT, and RendezvousLost where its name is not known.
    """
    if endpoint is None:
        return _LOOPBACK
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--rdzv-endpoint {endpoint}: expected HOST:PORT", ExitCode.BAD_INPUT)
    try:
        address = address_towards(host, int(port))
    except OSError as error:
        # A container's name is known only while it runs, and a node that is cut off knows none: both may come back.
        raise RendezvousLost(endpoint, error) from None
    if is_host and names_loopback(host, address):
        with contextlib.suppress(OSError):
            return address_towards(_ELSEWHERE)
    return address


def _await_answer(endpoint: str) -> None:
    """Wait for somebody to listen there; torch would wait for a minute, and show its call stack."""
    host, _, port = endpoint.rpartition(":")
    deadline = time.monotonic() + _ANSWER_SECONDS
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RendezvousLost(endpoint, error) from None
        time.sleep(0.2)
