"""Which address of this machine its peers come by, and stores that listen at that one alone.

Whoever reaches a store can run code on its ranks, and torch's TCPStore listens at every address, whatever host name it
is given. It also takes a socket that listens already: the socket is made here.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil

from ddp_core.base.errors import ExitCode, UserError

if TYPE_CHECKING:
    import torch.distributed as dist

_LOOPBACK = "127.0.0.1"
_INTERFACE = "GLOO_SOCKET_IFNAME"
_WAITING = 1024
"""Ranks that may try to connect at the same moment."""


def address_towards(host: str, port: int = 9) -> str:
    """The address of the interface that leads to `host`; nothing is sent. Raises OSError for an unknown name."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def address_served(host: str) -> str | None:
    """The address of this machine that others reach by the name `host`; None where the name does not tell.

    It does not tell where it stands for several addresses or for another machine's, as in front of address translation,
    nor where it is this machine's own name and /etc/hosts makes it a loopback address, as Debian does.
    """
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return None
    if host == "localhost" and _LOOPBACK in found:
        return _LOOPBACK
    address = found.pop()
    if found or not _is_here(address) or (is_loopback(address) and host not in ("localhost", address)):
        return None
    return address


def is_loopback(address: str) -> bool:
    """Whether only this machine itself can be reached by the address."""
    return ipaddress.ip_address(address).is_loopback


def store_at(
    address: str | None, port: int, timeout: float, name: str = "port {port}", remedy: str = "choose another"
) -> dist.TCPStore:
    """A new store that listens at this address of this machine (None: at every address), on `port` (0: a free one).

    `timeout`, in seconds, limits every wait for the store. `name` is what the user calls the port, and `remedy` what to
    do where it is taken.

    Raises UserError (4) where the port cannot be had, UserError (2) where this machine does not have the address, and
    torch's DistError where the store does not answer.
    """
    return store_on(listen_at(address, port, name, remedy), timeout)


def listen_at(
    address: str | None, port: int, name: str = "port {port}", remedy: str = "choose another"
) -> socket.socket:
    """A socket that listens at this address of this machine (None: at every address), on `port` (0: a free one).

    `name` is what the user calls the port, and `remedy` what to do where it is taken. Needs no torch, so whoever asks
    first for a port that is taken need not wait for torch.

    Raises UserError (4) where the port cannot be had, and UserError (2) where this machine does not have the address.
    """
    with _in_words(address, port, name, remedy):
        return _listen(address, port)


def require_port(address: str | None, port: int, name: str, remedy: str) -> None:
    """Raise as `listen_at` does, where it would.

    Nothing listens meanwhile: a rank that is already looking for the store would be connected and cut off.
    """
    with _in_words(address, port, name, remedy):
        _bind(address, port).close()


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


@contextlib.contextmanager
def gloo_towards(host: str | None, has_peers_elsewhere: bool) -> Iterator[None]:
    """While in the block, ranks listen for each other on the interface that leads to `host`, where gloo would choose.

    gloo itself takes the address of the machine's own name, which need not be in the network of the peers. What
    GLOO_SOCKET_IFNAME says is kept. `has_peers_elsewhere`: whether there are ranks on other machines; then the choice
    is gloo's where `host` is a name that /etc/hosts makes a loopback address.

    Raises UserError where GLOO_SOCKET_IFNAME names no interface with an IP address.
    """
    given = os.environ.get(_INTERFACE)
    known = sorted({name for name, _ in _interfaces()})
    if given and given not in known:
        raise UserError(f"{_INTERFACE}={given}: no such network interface; there are: {', '.join(known)}")
    chosen = None if given or host is None else _interface_towards(host, has_peers_elsewhere)
    if chosen is None:
        yield
        return
    os.environ[_INTERFACE] = chosen
    try:
        yield
    finally:
        os.environ.pop(_INTERFACE, None)


def _interface_towards(host: str, has_peers_elsewhere: bool) -> str | None:
    try:
        address = address_towards(host)
    except OSError:
        return None
    if has_peers_elsewhere and is_loopback(address) and host not in ("localhost", address):
        return None
    return next((name for name, address_of in _interfaces() if address_of == address), None)


def _interfaces() -> list[tuple[str, str]]:
    """The network interfaces that have an IP address, each with each of its addresses."""
    return [
        (name, entry.address.partition("%")[0])
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]


def _addresses() -> list[str]:
    return [f"{address} ({name})" for name, address in _interfaces()]


def _is_here(address: str) -> bool:
    try:
        _bind(address, 0).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _in_words(address: str | None, port: int, name: str, remedy: str) -> Iterator[None]:
    """Make of the system's errors what `listen_at` raises."""
    try:
        yield
    except OSError as error:
        if address is not None and error.errno == errno.EADDRNOTAVAIL:
            raise UserError(
                f"no network interface of this machine has the address {address}; there are: {', '.join(_addresses())}"
            ) from None
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({os.strerror(error.errno or 0)})"
        raise UserError(f"{name.format(port=port)} {why}; {remedy}", ExitCode.RESOURCES) from None


def _listen(address: str | None, port: int) -> socket.socket:
    with contextlib.ExitStack() as on_error:
        bound = on_error.enter_context(_bind(address, port))
        bound.listen(_WAITING)
        on_error.pop_all()
    return bound


def _bind(address: str | None, port: int) -> socket.socket:
    every = address is None and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if every or ":" in (address or "") else socket.AF_INET
    with contextlib.ExitStack() as on_error:
        bound = on_error.enter_context(socket.socket(family, socket.SOCK_STREAM))
        # A port whose connections of before are still being closed counts as free.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not every))
        bound.bind((address or "", port))
        on_error.pop_all()
    return bound
