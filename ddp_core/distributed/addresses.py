"""Which address of this machine its peers use, and stores that listen at that address alone.

Whoever reaches a store can run code on its ranks, and torch's TCPStore listens at every address, whatever host name it
is given. It also takes a socket that listens already: that socket is made here.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ddp_core.base.errors import ExitCode, UserError

if TYPE_CHECKING:
    import torch.distributed as dist

_LOOPBACK = "127.0.0.1"
_INTERFACE = "GLOO_SOCKET_IFNAME"
_WAITING = 1024
"""Ranks that may try to connect at the same moment."""
_SILENT_SECONDS = 10.0
"""After so long without a sign of life from the machine of a store, the store counts as lost."""


def address_towards(host: str, port: int = 9) -> str:
    """The address of the interface that leads to `host`; nothing is sent. Raises OSError for an unknown name."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def address_served(host: str) -> str | None:
    """The address of this machine that others reach by the name `host`; None where the name does not tell.

    The name does not tell where it stands for several addresses, for an address of another machine, as in front of
    address translation, or for a loopback address (`names_loopback`).
    """
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        if host == "localhost" and _LOOPBACK in found:
            return _LOOPBACK
        address = found.pop()
        if found or names_loopback(host, address):
            return None
        _bind(address, 0).close()  # which only an address of this machine allows
    except OSError:
        return None
    return address


def names_loopback(host: str, address: str) -> bool:
    """Whether /etc/hosts makes `host` the loopback address `address`, as Debian does with a machine's own name.

    Other machines reach this one by another address.
    """
    return ipaddress.ip_address(address).is_loopback and host not in ("localhost", address)


def listen_at(
    address: str | None, port: int, name: str = "port {port}", remedy: str = "choose another", listens: bool = True
) -> socket.socket:
    """A socket that listens at this address of this machine (None: at every address), on `port` (0: a free one).

    `name` is what the user calls the port, and `remedy` what to do where it is taken. Needs no torch, so a user who
    asks for a port that is taken need not wait for torch.

    Raises UserError (4) where the port cannot be had, and UserError (2) where this machine does not have the address.
    """
    try:
        return _bind(address, port, listens)
    except OSError as error:
        if address is not None and error.errno == errno.EADDRNOTAVAIL:
            known = ", ".join(f"{other} ({interface})" for interface, other in _interfaces())
            raise UserError(
                f"no network interface of this machine has the address {address}; there are: {known}"
            ) from None
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({os.strerror(error.errno or 0)})"
        raise UserError(f"{name.format(port=port)} {why}; {remedy}", ExitCode.RESOURCES) from None


def require_port(address: str | None, port: int, name: str, remedy: str) -> None:
    """Raise as `listen_at` does, where it would.

    Nothing listens meanwhile: a rank that is already looking for the store would be connected and cut off.
    """
    listen_at(address, port, name, remedy, listens=False).close()


def store_on(listening: socket.socket, timeout: float) -> dist.TCPStore:
    """A new store on a socket that listens; the store closes the socket. `timeout`, in seconds, limits every wait.

    Raises torch's DistError where the store does not answer.
    """
    from torch.distributed import TCPStore

    host, port = listening.getsockname()[:2]
    # The name of 127.0.0.1, which torch looks up for its messages, is known without a name server.
    return TCPStore(
        _LOOPBACK if ipaddress.ip_address(host).is_unspecified else host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listening.detach(),
    )


def give_up_silence(port: int, seconds: float = _SILENT_SECONDS) -> None:
    """Let this process's connections to a port of whatever machine fail once that machine is silent for so long.

    torch's store waits for an answer without a limit, also where its machine has no network or power any more. The
    kernel can tell, and does so for connections made before this call. On Linux; elsewhere this does nothing.
    """
    opened = Path("/proc/self/fd")
    for entry in list(opened.iterdir()) if opened.is_dir() else []:
        with contextlib.suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(seconds / 2)))
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(seconds / 4)))
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))


@contextlib.contextmanager
def gloo_towards(host: str | None, has_peers_elsewhere: bool) -> Iterator[None]:
    """While in the block, ranks listen for each other on the interface that leads to `host`, where gloo would choose.

    gloo itself takes the address of the machine's own name, which need not be in the network of the peers. What
    GLOO_SOCKET_IFNAME says is kept. `has_peers_elsewhere`: whether there are ranks on other machines; then the choice
    is gloo's where `host` is a name that /etc/hosts makes a loopback address.

    Raises UserError where GLOO_SOCKET_IFNAME names no interface with an IP address.
    """
    given, interfaces = os.environ.get(_INTERFACE), _interfaces()
    known = sorted({name for name, _ in interfaces})
    if given and given not in known:
        raise UserError(f"{_INTERFACE}={given}: no such network interface; there are: {', '.join(known)}")
    chosen = None
    if host is not None and not given:
        with contextlib.suppress(OSError):
            towards = address_towards(host)
            if not (has_peers_elsewhere and names_loopback(host, towards)):
                chosen = next((name for name, address in interfaces if address == towards), None)
    if chosen is not None:
        os.environ[_INTERFACE] = chosen
    try:
        yield
    finally:
        if chosen is not None:
            os.environ.pop(_INTERFACE, None)


def _interfaces() -> list[tuple[str, str]]:
    """The network interfaces that have an IP address, each with each of its addresses."""
    return [
        (name, entry.address.partition("%")[0])
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]


def _bind(address: str | None, port: int, listens: bool = False) -> socket.socket:
    """A socket at this address (None: at every address) and port. Raises OSError."""
    every = address is None and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if every or ":" in (address or "") else socket.AF_INET
    with contextlib.ExitStack() as on_error:
        bound = on_error.enter_context(socket.socket(family, socket.SOCK_STREAM))
        # A port counts as free while connections that it had before are still being closed.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not every))
        bound.bind((address or "", port))
        if listens:
            bound.listen(_WAITING)
        on_error.pop_all()
    return bound
