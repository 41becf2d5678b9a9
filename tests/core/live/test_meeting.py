"""How the nodes of a live recovery meet, on a real store."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from ddp_core.launch.nodes import Meeting
from ddp_core.live import meeting as live_meeting
from ddp_core.live.meeting import LiveRendezvous
from ddp_core.live.members import Members
from ddp_core.live.membership import Membership, node_of
from tests.support.commands import wait_until
from tests.support.processes import HANG


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=HANG))


def place(
    store: dist.TCPStore, least: int, most: int, seconds: float = HANG, kind: type[LiveRendezvous] = LiveRendezvous
) -> LiveRendezvous:
    """The rendezvous as one node has it, with a connection of its own."""
    own = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    meeting = Meeting(least, most, f"127.0.0.1:{store.port}", "test")
    return kind(own, meeting, "127.0.0.1", {"code": "1"}, 2, seconds)


def met(*places: LiveRendezvous) -> list[LiveRendezvous]:
    with ThreadPoolExecutor(len(places)) as pool:
        list(pool.map(lambda each: each.next_rendezvous(), places, timeout=HANG))
    return list(places)


def members_of(each: LiveRendezvous, store: dist.TCPStore) -> Members:
    return Members(dist.PrefixStore(each.members_at.partition("/")[2], store))


def test_nodes_meet_at_one_list(store: dist.TCPStore) -> None:
    places = met(*(place(store, 3, 3) for _ in range(3)))
    assert sorted(each.node for each in places) == [0, 1, 2]
    assert {each.first for each in places} == {(0, 1, 2)}
    assert len({each.members_at for each in places}) == 1
    expected = ("0.0@0", "1.0@0", "0.0@1", "1.0@1", "0.0@2", "1.0@2")
    assert members_of(places[0], store).now() == Membership(0, expected)


class Slow(LiveRendezvous):
    """A node that comes, and then does nothing for a while."""

    turns = 0

    def _require_open(self) -> None:
        super()._require_open()
        self.turns += 1
        if self.turns == 4:
            time.sleep(1)


def test_a_node_that_is_slow_when_all_have_come_is_still_one_of_them(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's rendezvous drops a node then whose sign of life is late, and the others wait for it."""
    monkeypatch.setattr(live_meeting, "_GONE_SECONDS", 0.5)
    slow, other = met(place(store, 2, 2, kind=Slow), place(store, 2, 2))
    assert isinstance(slow, Slow)
    assert slow.turns <= 4, "it has read of the beginning once it went on"
    assert slow.first == other.first == (0, 1)


def test_who_is_too_slow_for_the_first_ones_joins_them(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_meeting, "_LAST_CALL_SECONDS", 0.3)
    first, late = place(store, 1, 2), place(store, 1, 2)
    met(first)
    assert (first.node, first.first) == (0, (0,))
    late.next_rendezvous()
    assert (late.node, late.first, late.members_at) == (1, (0,), first.members_at)


def test_a_node_that_has_come_and_gone_is_not_waited_for(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_meeting, "_LAST_CALL_SECONDS", 0.3)
    monkeypatch.setattr(live_meeting, "_GONE_SECONDS", 0.5)
    gone = place(store, 2, 4, seconds=0.5)
    with pytest.raises(RendezvousTimeoutError):
        gone.next_rendezvous()
    one, two = met(place(store, 2, 4), place(store, 2, 4))
    assert one.first == two.first == (1, 2)


def test_a_node_waits_until_there_is_room(store: dist.TCPStore) -> None:
    (first,) = met(place(store, 1, 1))
    late = place(store, 1, 1)
    with ThreadPoolExecutor(1) as pool:
        comes = pool.submit(late.next_rendezvous)
        time.sleep(0.3)
        assert not comes.done()
        members = members_of(first, store)
        members.replace(members.now(), Membership(1, ("0.1@0",)))
        members.note("over", "broken")
        comes.result(HANG)
    assert late.members_at != first.members_at, "a list that counts no more takes nobody in"
    assert late.node in late.first


def test_a_launch_that_has_ended_takes_nobody_in(store: dist.TCPStore) -> None:
    (first,) = met(place(store, 1, 2))
    first.shutdown()
    with pytest.raises(RendezvousClosedError):
        place(store, 1, 2).next_rendezvous()
    assert first.is_closed()


def another(store: dist.TCPStore, each: LiveRendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an empty store take the place of the one where this node has met."""
    monkeypatch.setattr(each, "_port", store.port)
    assert each.find_again()


def test_a_list_is_written_into_an_empty_store(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = met(place(store, 1, 2))
    empty = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=HANG))
    another(empty, first, monkeypatch)
    trained = Membership(3, ("0.0@0", "1.0@0"))
    members = first.renew(trained, nodes=2)
    assert members.now() == trained
    members.give_numbers_again()
    late = place(empty, 1, 2)
    late.next_rendezvous()
    assert (late.node, late.first) == (2, (0,))


def test_where_others_have_begun_in_the_new_store_they_count(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = met(place(store, 1, 2))
    empty = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=HANG))
    (other,) = met(place(empty, 1, 1))
    another(empty, first, monkeypatch)
    assert first.renew(Membership(3, ("0.0@0",)), nodes=1) is None
    assert {node_of(name) for name in members_of(other, empty).now().members} == {0}


def test_a_store_is_searched_until_somebody_listens(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    each = place(store, 1, 1)
    wait_until(each.search().is_set, HANG, "it is found")
    monkeypatch.setattr(live_meeting, "_SEARCH_SECONDS", 0.01)
    monkeypatch.setattr(each, "_port", 9)
    never = each.search()
    assert not never.wait(0.1)
    never.set()
