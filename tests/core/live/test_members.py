"""The list of members and the notes beside it, on a real store."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from ddp_core.live.members import Members, store_at
from ddp_core.live.membership import Membership

FIRST = Membership(0, ("0.0@0", "0.0@1"))


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def begun(store: dist.Store, most_nodes: int = 3) -> Members:
    members = Members(store, most_nodes)
    members.begin(FIRST)
    return members


def test_of_two_that_decide_the_first_one_counts(store: dist.TCPStore) -> None:
    members, other = (begun(store_at(f"127.0.0.1:{store.port}/ddp/1", 20)) for _ in range(2))
    one, two = Membership(1, ("0.0@0",)), Membership(1, ("0.0@1",))
    assert members.replace(FIRST, one)
    assert not other.replace(FIRST, two)
    assert other.now() == one
    assert other.read().left == {}


def test_no_more_nodes_are_taken_in_than_there_may_be(store: dist.TCPStore) -> None:
    members = begun(store)
    members.note("asked", "0.0@3", "0.0@2", "1.0@2")
    assert members.read().waiting == {"0.0@2", "1.0@2"}
    members.note("ended", "0.0@1")
    assert members.read().waiting == {"0.0@2", "1.0@2", "0.0@3"}


def test_an_empty_store_gets_what_launchers_know_and_new_nodes_wait_for_all_of_them(store: dist.TCPStore) -> None:
    one, two = Members(store), Members(store)
    newer = Membership(4, ("0.0@1", "0.0@3"))
    assert one.renew(Membership(3, ("0.0@1",)), nodes=3)
    assert one.read().now.number == 3
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(dist.DistStoreError):
        one.number_of_new_node()
    assert two.renew(newer, nodes=5)
    assert one.renew(FIRST, nodes=2)
    assert two.read().now == newer
    assert two.read().left == {}
    one.give_numbers_again()
    two.give_numbers_again()
    assert [one.number_of_new_node(), two.number_of_new_node()] == [5, 6]
    assert not one.renew(Membership(4, ("0.0@1",)), nodes=2)
    assert two.read().now == newer
