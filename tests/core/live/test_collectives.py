"""Collectives whose failure a process outlives: nobody waits for who is left behind, or is stuck for ever."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from ddp_core.distributed import process_group
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.world import World
from ddp_core.live import collectives as live
from ddp_core.live.collectives import SPARING, LiveCollectives
from tests.core.distributed.feigned_nccl import Event, done
from tests.support.commands import wait_until
from tests.support.wording import refusing

__all__ = ["done"]

CPU = torch.device("cpu")
WORLD = World(1, 2, member="1.0@0", members_at="here:1/list")


def a_member(is_left_behind: bool = False, makes_room: bool = False) -> Any:
    return SimpleNamespace(is_left_behind=is_left_behind, makes_room=makes_room)


def collectives(is_left_behind: bool = False) -> LiveCollectives:
    return LiveCollectives(WORLD, torch.device("cuda"), a_member(is_left_behind))


@pytest.mark.usefixtures("done")
def test_a_wait_for_the_device_ends_when_the_others_have_gone_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "nccl_failure", lambda _: None)
    ours, event = collectives(is_left_behind=True), SimpleNamespace(query=lambda: False)
    with refusing(dist.DistBackendError):
        ours.await_event(cast(Any, event))


def test_ranks_that_meet_do_not_wait_for_one_without_which_the_others_go_on() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    class Member:
        answers = iter([False, False, True])
        is_left_behind = property(lambda self: next(self.answers))

    started = time.monotonic()
    with pytest.raises(dist.DistStoreError):
        process_group._await(store, ["present/1"], 60, LiveCollectives(WORLD, CPU, cast(Any, Member())))
    assert time.monotonic() - started < 30


class Left:
    """A member that finds at its third look that the others have gone on without it."""

    looks = 0

    @property
    def is_left_behind(self) -> bool:
        self.looks += 1
        return self.looks > 2


def test_a_collective_that_gloo_does_not_end_ends_when_the_others_have_gone_on() -> None:
    ours, never = LiveCollectives(WORLD, CPU, cast(Any, Left())), threading.Event()
    with refusing(dist.DistBackendError):
        ours.call_collective(lambda: never.wait(60))
    never.set()


def test_who_is_gone_is_not_told_that_the_others_have_gone_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exchange:
        def give_up(self, error: Exception) -> None:
            raise AssertionError

    monkeypatch.setattr(live, "ASKING_SECONDS", 0.01)
    member, exchange = Left(), Exchange()
    LiveCollectives(WORLD, CPU, cast(Any, member)).when_left_behind(exchange.give_up)
    del exchange
    wait_until(lambda: all(each.name != "left-behind" for each in threading.enumerate()), 60, "the thread ends")
    assert member.looks <= 2


@pytest.mark.usefixtures("done")
def test_ranks_agree_only_when_their_devices_have_come_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    event: Any = Event()
    monkeypatch.setattr(process_group, "nccl_failure", lambda _: None)
    monkeypatch.setattr(Collectives, "barrier", lambda _: said.append(event.looks))
    said: list[int] = []
    collectives().await_step(None, event)
    assert said == [3]


@pytest.mark.parametrize("is_live", [False, True])
def test_a_live_recovery_lets_no_thread_of_torchs_end_the_process(
    is_live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, str]] = []
    for name in SPARING:
        monkeypatch.setenv(name, "3")
    monkeypatch.setattr(process_group, "_meet", lambda *_: None)
    monkeypatch.setattr(process_group, "agreed_backend", lambda *_: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "init_process_group", lambda **_: found.append(dict(os.environ)))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    kind = (lambda world, device: LiveCollectives(world, device, a_member())) if is_live else Collectives
    with process_group.process_group(WORLD, torch.device("cuda", 0), timeout=5, kind=kind):
        pass
    expected = SPARING if is_live else dict.fromkeys(SPARING, "3")
    assert {name: found[0][name] for name in SPARING} == expected


@pytest.mark.parametrize("ends", [True, False])
def test_a_process_whose_device_stays_stuck_ends_in_a_live_recovery(
    ends: bool, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "abort_process_groups", lambda _: ends)
    monkeypatch.setattr(live, "end_this_process", done.append)
    with pytest.raises(KeyError), collectives().abandoned_on_error():
        raise KeyError
    assert done == [] if ends else ["rank 1 (node 0): NCCL does not end, so this process does"]


def test_who_is_stuck_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(live, "_STUCK_SECONDS", 0.01)
    monkeypatch.setattr(live, "end_this_process", said.append)
    with live.ended_if_stuck("rank 1 (node 0)"):
        time.sleep(0.2)
    assert said == ["rank 1 (node 0): NCCL does not connect, so this process ends"]


def test_in_a_live_recovery_a_process_keeps_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of three is lost: what was rank 2 is rank 1 from now on, and a new process comes last."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    for local_rank, number in ((0, 0), (1, 2), (2, 1), (0, 3)):
        world = World(local_rank, 3, local_rank, 3, started_as=number)
        assert process_group.local_device(world, "cuda").index == number
