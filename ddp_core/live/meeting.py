"""How the nodes of a live recovery meet: at a list of members in a store, to which later nodes come, too.

torch's rendezvous is not used here. It counts a node as gone whose sign of life is three seconds late, as on a busy
machine, also between the moment at which all have met and the moment at which each has read that; the others then wait
for a node that is not in their round.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import socket
import threading
import time
from collections.abc import Mapping

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from ddp_core.distributed.addresses import give_up_silence
from ddp_core.launch.meeting import note_request
from ddp_core.launch.nodes import Meeting
from ddp_core.live.members import Members, connected_store
from ddp_core.live.membership import Membership, name_of, node_of

_NEWEST, _CLOSED = "newest", "closed"
_LAST_CALL_SECONDS = 2.0
"""After so long without one more node, those that have come begin, if they are enough."""
_GONE_SECONDS = 10.0
"""A node that has come, and of which nothing has been heard for so long, is not waited for."""
_LOOK_SECONDS = 0.1
_FULL_SECONDS = 0.5
"""Between two looks whether there is room for one more node."""
_SEARCH_SECONDS = 0.5
_ANSWER_SECONDS = 30


class LiveRendezvous(RendezvousHandler):
    """The rendezvous of a live recovery: a node that comes later joins the workers that train, who need not stop.

    Each list of members has a part of the store of its own. Where the newest list counts no more, a new one is begun by
    the nodes that come. `store`: where they meet. `address`: this node's own. `facts`: what all nodes must have in
    common. `join_seconds`: how long to wait for the least number of nodes.
    """

    def __init__(
        self, store: TCPStore, meeting: Meeting, address: str, facts: Mapping[str, str], count: int, join_seconds: float
    ) -> None:
        self.meeting, self.address = meeting, address
        self._facts, self._count, self._join_seconds = facts, count, join_seconds
        self._prefix = f"ddp/{meeting.launch_id}"
        self._host, self._port = store.host, store.port
        give_up_silence(store.port)
        self._lists = PrefixStore(self._prefix, store)
        self._name = ""
        self.node = -1
        """This node's number."""
        self.first: tuple[int, ...] = ()
        """The nodes that began with this list; of a late node, one that trains already."""

    @property
    def members_at(self) -> str:
        """Where the list of this node's workers is, as `store_at` takes it."""
        return f"{self._host}:{self._port}/{self._prefix}/{self._name}"

    @property
    def can_be_lost(self) -> bool:
        """Whether the store can be lost while this launcher lives."""
        return self.meeting.endpoint is not None and not self.meeting.is_host

    def next_rendezvous(self) -> RendezvousInfo:
        """See torch. Raises RendezvousClosedError, RendezvousTimeoutError and DistError."""
        deadline = time.monotonic() + self._join_seconds
        while not self._comes(self._newest_list(), deadline):
            pass
        of_list = PrefixStore(self._name, self._lists)
        # Ranks and counts are those of the list of members; these only have to be possible ones.
        return RendezvousInfo(of_list, self.node, 1 + max(self.node, *self.first), RendezvousStoreInfo(self.address, 0))

    def _newest_list(self) -> str:
        """The name of the newest list that counts, which is begun here where there is none."""
        newest = self._lists.compare_set(_NEWEST, "", _new_name()).decode()
        while self._members(newest).is_over:
            self._lists.compare_set(_NEWEST, newest, _new_name())
            newest = self._lists.get(_NEWEST).decode()
        return newest

    def _members(self, name: str) -> Members:
        return Members(PrefixStore(name, self._lists), self.meeting.max_nodes)

    def _comes(self, name: str, deadline: float) -> bool:
        """Come to a list; returns whether this node has a place there, and not whether the list has ended meanwhile."""
        members = self._members(name)
        if not members.has_begun:
            node = self._number(name, members)
            if not self._gather(name, members, node, deadline):
                return False
            now = members.now()
            first = tuple(sorted(set(map(node_of, now.members))))
            if now.number == 0 and node in first:
                self._name, self.node, self.first = name, node, first
                return True
            # It was slow, and may have been taken for lost under that number: it takes another one.
        return self._joins(name, members)

    def _joins(self, name: str, members: Members) -> bool:
        """Come to those that train already, once there is room; False where the list has ended meanwhile."""
        while not (notes := members.read()).over:
            self._require_open()
            if notes.alive and len(notes.nodes) < self.meeting.max_nodes:
                self._name, self.node = name, self._number(name, members)
                self.first = (min(map(node_of, notes.alive)),)
                return True
            time.sleep(_FULL_SECONDS)
        return False

    def _number(self, name: str, members: Members) -> int:
        """A number for this node in a list, under which the others find what it is to train."""
        node = members.number_of_new_node()
        note_request(PrefixStore(name, self._lists), node, self._facts)
        return node

    def _gather(self, name: str, members: Members, node: int, deadline: float) -> bool:
        """Wait until the nodes that have come are enough, and let them begin; False where another list counts now."""
        beats: dict[int, int] = {}
        heard = {node: math.inf}
        newest_at = time.monotonic()
        while not members.has_begun:
            if self._lists.get(_NEWEST).decode() != name:
                return False
            self._require_open()
            members.beat(node)
            now = time.monotonic()
            for other, beat in members.beats(range(members.nodes_come())).items():
                # The first look does not tell whether that node still lives.
                if other != node and beats.setdefault(other, beat) != beat:
                    newest_at = newest_at if other in heard else now
                    beats[other], heard[other] = beat, now
            here = sorted(other for other, at in heard.items() if now - at < _GONE_SECONDS)
            most, least = self.meeting.max_nodes, self.meeting.min_nodes
            if len(here) >= most or (len(here) >= least and now - newest_at > _LAST_CALL_SECONDS):
                names = tuple(name_of(each, rank, 0) for each in here[:most] for rank in range(self._count))
                members.begin(Membership(0, names))
            elif now > deadline:
                raise RendezvousTimeoutError
            else:
                time.sleep(_LOOK_SECONDS)
        return True

    def search(self) -> threading.Event:
        """Set once somebody listens again where the store was lost; whoever sets it ends the search."""
        found = threading.Event()

        def look() -> None:
            while not found.wait(_SEARCH_SECONDS):
                with contextlib.suppress(OSError):
                    socket.create_connection((self._host, self._port), 2).close()
                    found.set()

        threading.Thread(target=look, daemon=True).start()  # since a name server may be slow
        return found

    def find_again(self) -> bool:
        """Connect to the store anew, after somebody listens at its place again; returns whether it answers."""
        try:
            lists = PrefixStore(self._prefix, connected_store(self._host, self._port, _ANSWER_SECONDS))
            lists.check([_NEWEST])
        except DistError:
            return False
        self._lists = lists
        return True

    def renew(self, offered: Membership, nodes: int) -> Members | None:
        """The list of this node's workers in a store that was lost and is back; None where it counts no more.

        See `Members.renew`. Where a list has begun that knows nothing of this one, that one counts.
        """
        members = self._members(self._name)
        if not members.renew(offered, nodes):
            return None
        note_request(PrefixStore(self._name, self._lists), self.node, self._facts)
        while (newest := self._lists.compare_set(_NEWEST, "", self._name).decode()) != self._name:
            other = self._members(newest)
            if other.has_begun and not other.is_over:
                return None
            self._lists.compare_set(_NEWEST, newest, self._name)
        return members

    def _require_open(self) -> None:
        if self.is_closed():
            raise RendezvousClosedError

    def get_backend(self) -> str:
        return "ddp-live"

    def get_run_id(self) -> str:
        return str(self.meeting.launch_id)

    def is_closed(self) -> bool:
        return bool(self._lists.check([_CLOSED]))

    def set_closed(self) -> None:
        self._lists.set(_CLOSED, "1")

    def num_nodes_waiting(self) -> int:
        return 0  # a node that comes later joins those that train

    def shutdown(self) -> bool:
        self.set_closed()
        return True


def _new_name() -> str:
    # Never one that another store of this launch has had.
    return f"list-{secrets.token_hex(4)}"
