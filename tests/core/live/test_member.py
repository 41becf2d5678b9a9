"""How a process takes its place in a group, by the list of members in a real store."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from ddp_core.distributed.world import World
from ddp_core.live import member as live
from ddp_core.live.member import Member
from ddp_core.live.members import Members
from ddp_core.live.membership import Membership
from tests.support.commands import wait_until

MINE, OTHER = "0.0@0", "0.0@1"


def test_who_comes_when_the_others_have_stopped_waiting_leaves_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would wait alone in a group whose other members have left, until its own time is over."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    monkeypatch.setattr(live, "store_at", lambda *_: store)
    members, first = Members(store), Membership(0, (MINE, OTHER))
    members.begin(first)
    members.note_here(0, OTHER)
    members.note_left(0, OTHER, 7)
    member = Member(World(0, 2, member=MINE, members_at="here:1/list", report_dir=tmp_path), timeout=60)
    found: list[World | None] = []
    waiting = threading.Thread(target=lambda: found.append(member.take(lambda: False)), daemon=True)
    waiting.start()
    wait_until(lambda: MINE in members.read().left, 20, "it has left")
    following = members.read().following
    assert following == Membership(1, (MINE, OTHER))
    members.replace(first, following)
    members.note_here(1, OTHER)
    waiting.join(20)
    assert [(world.rank, world.membership) for world in found if world is not None] == [(0, 1)]
