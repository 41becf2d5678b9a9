"""The list of members in a store, and what processes and launchers note beside it: membership.py on a real store."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, cast

import torch.distributed as dist

from ddp_core.distributed.addresses import give_up_silence
from ddp_core.live.membership import Membership, next_membership, node_of, renewed

Over = Literal["", "done", "broken"]
"""Whether a list still counts: it does; the run is done; no group can go on, and all meet anew or end."""
Log = Literal["asked", "ended", "leaving", "launchers", "finished", "over"]
"""What is noted by one word after the other: names of processes (asked, ended), numbers of nodes, NODE=HOST:PORT."""

_NOW = "members/now"
_NOTES = "members/notes"
_NODES = "members/nodes"
_KNOWN_NODES = "members/known-nodes"
_CONNECTING_SECONDS = 1.0
_LOGS: tuple[Log, ...] = ("asked", "ended", "leaving", "launchers", "finished", "over")


@dataclass(frozen=True)
class Notes:
    """What all processes and launchers have noted until now."""

    now: Membership
    left: dict[str, int]
    """The finished steps that a member held when it left the group of `now`; -1 for no state."""
    waiting: frozenset[str]
    """New processes that are ready to be taken in."""
    ended: frozenset[str]
    leaving: frozenset[int]
    launchers: dict[int, str]
    """Where each launcher listens, by its node."""
    finished: frozenset[int]
    over: Over

    @property
    def alive(self) -> tuple[str, ...]:
        """The members that have not ended, as far as anybody has noted."""
        return tuple(name for name in self.now.members if name not in self.ended)

    @property
    def nodes(self) -> set[int]:
        """The nodes of the members, and of those that wait to be taken in."""
        return set(map(node_of, (*self.alive, *self.waiting)))

    @property
    def following(self) -> Membership | None:
        """The membership that follows; None where all stays. See `next_membership`."""
        return next_membership(self.now, self.ended, self.left, self.waiting, self.leaving)


class Members:
    """The list of members in a store, as all launchers and members see it.

    `most_nodes`: how many may have members. New processes of further nodes wait until one of these is gone.
    """

    def __init__(self, store: dist.Store, most_nodes: int = sys.maxsize) -> None:
        self._store, self._most_nodes = store, most_nodes

    def begin(self, first: Membership) -> Membership:
        """Write this membership, unless there is one; returns the one that is there then."""
        for log in _LOGS:
            self._append(log, "")
        self._append(f"left/{first.number}", "")
        return Membership.from_text(self._store.compare_set(_NOW, "", first.to_text()))

    def renew(self, offered: Membership, nodes: int) -> bool:
        """Write what a lost store had into one that may be empty; False where it has a group that knows nothing of us.

        `offered`: the group in which this launcher's own processes train. `nodes`: how many numbers of nodes have been
        given, as far as this launcher knows; a new node gets none until all launchers of the group have told that.
        """
        while (known := int(self._store.add(_KNOWN_NODES, 0))) < nodes:
            self._store.compare_set(_KNOWN_NODES, str(known), str(nodes))
        stored = self.begin(offered)
        while (counts := renewed(stored, offered)) != stored:
            if counts is None:
                return False
            self._append(f"left/{counts.number}", "")
            stored = Membership.from_text(self._store.compare_set(_NOW, stored.to_text(), counts.to_text()))
        return True

    def give_numbers_again(self) -> None:
        """Let new nodes have numbers, once all launchers of the group are back at a store that was lost."""
        if not self._store.check([_NODES]):
            self._store.compare_set(_NODES, "", str(int(self._store.add(_KNOWN_NODES, 0))))

    @property
    def has_begun(self) -> bool:
        """Whether there is a membership."""
        return bool(self._store.check([_NOW]))

    @property
    def is_over(self) -> bool:
        """Whether there was a membership, and the list does not count any more."""
        return self.has_begun and bool(_words(self._store.get("members/over")))

    def number_of_new_node(self) -> int:
        """A number that no other node has. Waits while launchers come back to a store that was lost."""
        if self.has_begun:
            self._store.wait([_NODES])
        return int(self._store.add(_NODES, 1)) - 1

    def nodes_come(self) -> int:
        """How many numbers of nodes have been given, before there is a membership."""
        return int(self._store.add(_NODES, 0))

    def now(self) -> Membership:
        """The newest membership."""
        return Membership.from_text(self._store.get(_NOW))

    def read(self) -> Notes:
        """All that has been noted."""
        text, *logs = self._store.multi_get([_NOW, *(f"members/{log}" for log in _LOGS)])
        now = Membership.from_text(text)
        words = {log: _words(value) for log, value in zip(_LOGS, logs, strict=True)}
        ended, leaving = frozenset(words["ended"]), frozenset(map(int, words["leaving"]))
        asked = {name for name in words["asked"] if node_of(name) not in leaving} - ended - set(now.members)
        nodes = {node_of(name) for name in now.members if name not in ended}
        for node in sorted(set(map(node_of, asked)) - nodes)[: max(0, self._most_nodes - len(nodes))]:
            nodes.add(node)
        return Notes(
            now=now,
            left={name: int(step) for name, step in map(_pair, _words(self._store.get(f"members/left/{now.number}")))},
            waiting=frozenset(name for name in asked if node_of(name) in nodes),
            ended=ended,
            leaving=leaving,
            launchers={int(node): address for node, address in map(_pair, words["launchers"])},
            finished=frozenset(map(int, words["finished"])),
            over=cast(Over, words["over"][0]) if words["over"] else "",
        )

    def replace(self, now: Membership, following: Membership) -> bool:
        """Put one membership in the place of another; returns whether nobody was quicker."""
        self._append(f"left/{following.number}", "")
        stored = self._store.compare_set(_NOW, now.to_text(), following.to_text())
        self._store.add(_NOTES, 1)
        return Membership.from_text(stored) == following

    def note(self, log: Log, *words: object) -> None:
        """Note these words for everybody."""
        self._append(log, "".join(f"{word} " for word in words))
        self._store.add(_NOTES, 1)

    def note_left(self, number: int, name: str, step: int) -> None:
        """Note that a member has left the group of this number, and the finished steps that it holds."""
        self._append(f"left/{number}", f"{name}={step} ")
        self._store.add(_NOTES, 1)

    def note_here(self, number: int, name: str) -> None:
        """Note that a member is here for the group of this number."""
        self._append(f"here/{number}", f"{name} ")

    def are_here(self, now: Membership) -> bool:
        """Whether all members are here for the group of this membership; to be called by one that is."""
        return set(now.members) <= set(_words(self._store.get(f"members/here/{now.number}")))

    def count(self) -> int:
        """How much has been noted until now: one look tells whether there is anything new."""
        return int(self._store.add(_NOTES, 0))

    def beat(self, node: int) -> None:
        """Tell that the launcher of this node works."""
        self._store.add(f"members/beat/{node}", 1)

    def beats(self, nodes: Iterable[int]) -> dict[int, int]:
        """How often each of these launchers has told that it works."""
        return {node: int(self._store.add(f"members/beat/{node}", 0)) for node in nodes}

    def _append(self, log: str, text: str) -> None:
        # torch's stub files lack this method of all its stores.
        cast(Any, self._store).append(f"members/{log}", text)


def store_at(place: str, timeout: float) -> dist.Store:
    """The part of a launcher's or a rendezvous' store that has the list of members, at HOST:PORT/PREFIX.

    `timeout`, in seconds, limits every wait. Raises torch's DistError where the store does not answer.
    """
    host, port, prefix = _parts(place)
    return dist.PrefixStore(prefix, connected_store(host, port, timeout))


def connected_store(host: str, port: int, timeout: float) -> dist.TCPStore:
    """A store elsewhere, which counts as lost once nothing comes from its machine; as `store_at` otherwise."""
    store = dist.TCPStore(host, port, timeout=timedelta(seconds=timeout), wait_for_workers=False)
    give_up_silence(port)
    return store


def store_again_at(place: str, timeout: float) -> dist.Store:
    """As `store_at`; but raises OSError at once where nobody listens there."""
    host, port, _ = _parts(place)
    socket.create_connection((host, port), _CONNECTING_SECONDS).close()
    return store_at(place, timeout)


def _parts(place: str) -> tuple[str, int, str]:
    address, _, prefix = place.partition("/")
    host, _, port = address.rpartition(":")
    return host, int(port), prefix


def _words(value: bytes) -> list[str]:
    return value.decode().split()


def _pair(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name, value
