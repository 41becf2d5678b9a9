"""Nodes on one machine: network namespaces joined by a switch, each with a link that can be slowed down (root)."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import psutil

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of linux/sched.h
INTERFACE = "eth0"
_SWITCH = "ddp-bridge"
_LOCK = Path("/run/ddp-nodes.lock")
WANTED = "Linux, root, and the commands ip and tc, to give each process a network and a link of its own"
"""What `available` looks for."""


@cache
def available() -> bool:
    """Whether this process can make namespaces and slow down their links; found out by making one."""
    if sys.platform != "linux" or os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        return False
    try:
        with joined(1):
            slow_down(0, 100)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def address(node: int) -> str:
    """The node's address."""
    return f"10.213.77.{node + 1}"


@contextlib.contextmanager
def joined(nodes: int) -> Iterator[None]:
    """Make the namespaces and the switch, and remove them.

    Their names belong to the machine, so a second process waits until the first has removed its own. What a killed
    process left behind is removed first. Raises CalledProcessError where a namespace cannot be made.
    """
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _remove()
        try:
            # In a namespace of its own, where no firewall of this machine looks at what passes.
            _ip("netns", "add", _SWITCH)
            _ip("-n", _SWITCH, "link", "add", _SWITCH, "type", "bridge")
            _ip("-n", _SWITCH, "link", "set", _SWITCH, "up")
            for node in range(nodes):
                name = _namespace(node)
                _ip("netns", "add", name)
                _ip("-n", _SWITCH, "link", "add", name, "type", "veth", "peer", "name", INTERFACE, "netns", name)
                _ip("-n", _SWITCH, "link", "set", name, "master", _SWITCH, "up")
                _ip("-n", name, "address", "add", f"{address(node)}/24", "dev", INTERFACE)
                for interface in (INTERFACE, "lo"):
                    _ip("-n", name, "link", "set", interface, "up")
            yield
        finally:
            _remove()


def enter(node: int) -> None:
    """Move this process into the node's namespace; sockets that it opens from now on are the node's."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", _namespace(node)).open() as namespace:
        if libc.setns(namespace.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), _namespace(node))
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def slow_down(node: int, megabits: int) -> None:
    """Limit what the node sends to so many Mbit/s, by a token bucket of 128 KiB: 1 ms at 1 Gbit/s."""
    bucket = ["rate", f"{megabits}mbit", "burst", "128kb", "limit", "4mb"]
    _run("tc", "-n", _namespace(node), "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *bucket)


def bytes_out() -> int:
    """Bytes that have left the node of this process, headers included."""
    counters = psutil.net_io_counters(pernic=True)
    return int(counters[INTERFACE].bytes_sent)


def _namespace(node: int) -> str:
    return f"ddp-link-{node}"


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _remove() -> None:
    there = Path("/run/netns")
    mine = [_SWITCH, *(path.name for path in there.glob(_namespace(0)[:-1] + "*"))] if there.exists() else []
    for name in mine:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
