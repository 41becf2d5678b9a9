"""Open connections by which the launchers of several nodes notice each other's end, and a look at who has gone silent.

A launcher listens at its node's address and answers nobody: the kernel takes the connections, and closes them when the
launcher's process ends, whatever ends it. A machine that is cut off, or has lost its power, closes nothing; that is
what the beats are for, which launchers count in the store.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Collection, Mapping

from ddp_core.distributed.addresses import listen_at
from ddp_core.live.members import Members

_BEAT_SECONDS = 1.0
_SILENT_SECONDS = 6.0
_REFUSED_SECONDS = 2.0
"""A launcher without a beat for so long is silent, where nobody listens at its port any more."""


class Lines:
    """One launcher's connections to the others.

    `node`, `address`: its own.
    """

    def __init__(self, node: int, address: str, members: Members) -> None:
        self._node = node
        self._listening = listen_at(address, 0)
        host = f"[{address}]" if ":" in address else address
        self._address = f"{host}:{self._listening.getsockname()[1]}"
        self._lines: dict[int, socket.socket] = {}
        self._connected: set[int] = set()
        self.closed: set[int] = set()
        """The nodes whose launchers have ended."""
        self._refused: set[int] = set()
        self._beats: dict[int, tuple[int, float]] = {}
        self.tell(members)

    def tell(self, members: Members) -> None:
        """Let the others find this launcher, and hear of it; again where the store has been another one until now."""
        self._members, self._next_beat = members, 0.0
        members.beat(self._node)
        members.note("launchers", f"{self._node}={self._address}")

    def reach(self, launchers: Mapping[int, str]) -> None:
        """Connect to these launchers, without waiting; HOST:PORT by node."""
        for node, address in launchers.items():
            if node != self._node and node not in self._lines:
                host, _, port = address.rpartition(":")
                family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
                line = self._lines[node] = socket.socket(family, socket.SOCK_STREAM)
                line.setblocking(False)
                with contextlib.suppress(OSError):
                    line.connect((host.strip("[]"), int(port)))

    def look(self) -> bool:
        """Whether a launcher has ended since the last look; tells the others from time to time that this one works."""
        before = len(self.closed)
        for node in self._lines.keys() - self.closed - self._refused:
            self._look_at(node)
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + _BEAT_SECONDS
            self._members.beat(self._node)
            for node, beat in self._members.beats(self._lines.keys() - self.closed).items():
                if self._beats.get(node, (0, 0.0))[0] != beat:
                    self._beats[node] = beat, now
        return len(self.closed) > before

    def _look_at(self, node: int) -> None:
        line = self._lines[node]
        try:
            line.getpeername()
            self._connected.add(node)
        except OSError:
            pass  # not connected yet, or not any more
        try:
            if line.recv(1):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        # A firewall may refuse a connection; only the kernel of a launcher closes one.
        (self.closed if node in self._connected else self._refused).add(node)

    def silent(self, nodes: Collection[int]) -> set[int]:
        """Which of these nodes have launchers from which nothing has come for a while."""
        now = time.monotonic()

        def is_silent(node: int) -> bool:
            # One that has never been heard may have ended before it could tell where it listens. This launcher may have
            # been busy for long before it listens for the first time.
            _, heard = self._beats.setdefault(node, (0, now))
            return now - heard > (_REFUSED_SECONDS if node in self._refused else _SILENT_SECONDS)

        return {node for node in nodes if is_silent(node)}

    def close(self) -> None:
        """Let the others see that this launcher is gone."""
        for each in (self._listening, *self._lines.values()):
            each.close()
