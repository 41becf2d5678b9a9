"""The process group without GPUs: ranks agree on a backend by the names of their GPUs, and NCCL's failures end waits.

Ranks are threads here, GPUs are names, and NCCL is feigned.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.distributed import live_nccl, process_group
from ddp_core.distributed.live_nccl import SPARING
from ddp_core.distributed.process_group import Collectives, agreed_backend
from ddp_core.distributed.world import World

NCCL, GLOO = "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"


def agreed(monkeypatch: pytest.MonkeyPatch, uuids: list[str], backend: str = "auto") -> list[str | UserError]:
    """What each rank is told, by the names of the ranks' GPUs; an empty name is a CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device.index]))
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=60))

    def on_rank(rank: int) -> str | UserError:
        device = torch.device("cuda", rank) if uuids[rank] else torch.device("cpu")
        try:
            return agreed_backend(store, World(rank=rank, world_size=len(uuids)), device, backend)
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(uuids)) as ranks:
        return list(ranks.map(on_rank, range(len(uuids))))


@pytest.mark.parametrize(
    ("uuids", "asked", "expected"),
    [
        (["a", "b", "c"], "auto", NCCL),
        (["a", "b", "c"], "nccl", NCCL),
        (["a", "b", "c"], "gloo", GLOO),
        (["a"], "auto", NCCL),
        (["", ""], "auto", "gloo"),
        (["", ""], "nccl", "gloo"),
    ],
)
def test_ranks_with_a_gpu_each_take_nccl(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    uuids: list[str],
    asked: str,
    expected: str,
) -> None:
    assert agreed(monkeypatch, uuids, asked) == [expected] * len(uuids)
    assert capsys.readouterr().err == ""


def test_ranks_that_share_a_gpu_take_gloo_and_rank_0_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert agreed(monkeypatch, ["a", "b", "a", "c", "b"]) == [GLOO] * 5
    said = "ranks 0, 2 share a GPU; ranks 1, 4 share a GPU: the ranks exchange over gloo, which is slower than nccl\n"
    assert capsys.readouterr().err == said


def test_nccl_is_refused_on_every_rank_where_two_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for refusal in agreed(monkeypatch, ["a", "b", "b"], "nccl"):
        assert isinstance(refusal, UserError)
        assert str(refusal).startswith("ranks 1, 2 share a GPU, and nccl needs one for each rank")
        assert refusal.exit_code == ExitCode.RESOURCES


def test_nodes_that_see_the_same_gpus_take_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As two containers of two ranks do on a machine with four GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    for variables, numbers in (({}, [0, 1, 0, 1]), ({"DDP_NODES_SHARE_GPUS": "1"}, [0, 1, 2, 3])):
        places = [
            World(rank, 4, rank % 2, 2, rank // 2, store_host="here", store_port=1).to_environment() | variables
            for rank in range(4)
        ]
        worlds = [World.from_environment(place) for place in places]
        assert [process_group.local_device(world, "cuda").index for world in worlds] == numbers
        assert [World.from_environment(world.to_environment()) for world in worlds] == worlds


@pytest.mark.parametrize(("backends", "connects"), [(NCCL, True), (GLOO, False)])
def test_nccl_connects_at_once_and_not_in_the_first_step(
    backends: str, connects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(process_group, "agreed_backend", lambda *_: backends)
    monkeypatch.setattr(dist, "init_process_group", lambda **named: asked.update(named))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    device = torch.device("cuda", 1)
    with process_group.process_group(World(), device, timeout=5, even_alone=True):
        pass
    assert (asked["backend"], asked["device_id"]) == (backends, device if connects else None)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done to the process group, which seems to be one of NCCL."""
    found: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "destroy_process_group", lambda: found.append("destroyed"))
    monkeypatch.setattr(process_group, "abort_process_groups", lambda _: found.append("aborted"))
    return found


def collectives(device: str = "cuda") -> Collectives:
    return Collectives(World(0, 2), torch.device(device))


def test_after_an_error_collectives_are_aborted_once_and_not_waited_for(done: list[str]) -> None:
    ours = collectives()
    with pytest.raises(KeyError), ours.abandoned_on_error(), ours.abandoned_on_error():
        raise KeyError
    ours.end()
    assert done == ["aborted"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_an_error_the_group_is_destroyed(device: str, done: list[str]) -> None:
    ours = collectives(device)
    with ours.abandoned_on_error():
        pass
    ours.end()
    assert done == ["destroyed"]


def test_gloo_needs_no_abort(done: list[str]) -> None:
    ours = collectives("cpu")
    with pytest.raises(KeyError), ours.abandoned_on_error():
        raise KeyError
    ours.end()
    assert done == ["destroyed"]


class Event:
    """An event that the device reaches at the third look."""

    def __init__(self) -> None:
        self.looks = 0

    def query(self) -> bool:
        self.looks += 1
        return self.looks > 2


@pytest.mark.usefixtures("done")
def test_a_wait_for_the_device_ends_when_nccl_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[str | None] = [None, "REMOTE_ERROR"]
    monkeypatch.setattr(process_group, "nccl_failure", lambda _: failures.pop(0))
    event: Any = Event()
    with pytest.raises(dist.DistBackendError, match="NCCL met a REMOTE_ERROR"):
        collectives().await_event(event)
    monkeypatch.setattr(process_group, "nccl_failure", lambda _: None)
    event = Event()
    collectives().await_event(event)
    assert event.looks == 3


@pytest.mark.usefixtures("done")
def test_an_event_that_is_reached_proves_nothing_where_nccl_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort ends NCCL's kernels, so that the device goes on without what they should have received."""
    monkeypatch.setattr(process_group, "nccl_failure", lambda _: "TIMEOUT")
    event: Any = SimpleNamespace(query=lambda: True)
    with pytest.raises(dist.DistBackendError, match="NCCL met a TIMEOUT"):
        collectives().await_event(event)


@pytest.mark.usefixtures("done")
def test_a_wait_for_the_device_ends_when_the_others_have_gone_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "nccl_failure", lambda _: None)
    ours, event = collectives(), SimpleNamespace(query=lambda: False)
    ours.is_left_behind = lambda: True
    with pytest.raises(dist.DistBackendError, match="another rank was lost"):
        ours.await_event(cast(Any, event))


def test_ranks_that_meet_do_not_wait_for_one_without_which_the_others_go_on() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started, left_behind = time.monotonic(), iter([False, False, True])
    with pytest.raises(dist.DistStoreError):
        process_group._await(store, ["present/1"], 60, lambda: next(left_behind))
    assert time.monotonic() - started < 30


@pytest.mark.usefixtures("done")
def test_ranks_agree_only_when_their_devices_have_come_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    event: Any = Event()
    monkeypatch.setattr(process_group, "nccl_failure", lambda _: None)
    monkeypatch.setattr(Collectives, "barrier", lambda _: said.append(event.looks))
    said: list[int] = []
    collectives().await_all(event)
    assert said == [3]


LIVE = World(1, 2, member="1.0@0", members_at="here:1/list")


@pytest.mark.parametrize("world", [World(1, 2), LIVE])
def test_a_live_recovery_lets_no_thread_of_torchs_end_the_process(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, str]] = []
    for name in SPARING:
        monkeypatch.setenv(name, "3")
    monkeypatch.setattr(process_group, "_meet", lambda *_: None)
    monkeypatch.setattr(process_group, "agreed_backend", lambda *_: NCCL)
    monkeypatch.setattr(dist, "init_process_group", lambda **_: found.append(dict(os.environ)))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with process_group.process_group(world, torch.device("cuda", 0), timeout=5):
        pass
    expected = SPARING if world is LIVE else dict.fromkeys(SPARING, "3")
    assert {name: found[0][name] for name in SPARING} == expected


@pytest.mark.parametrize("ends", [True, False])
def test_a_process_whose_device_stays_stuck_ends_in_a_live_recovery(
    ends: bool, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "abort_process_groups", lambda _: ends)
    monkeypatch.setattr(live_nccl, "end_this_process", done.append)
    with pytest.raises(KeyError), Collectives(LIVE, torch.device("cuda")).abandoned_on_error():
        raise KeyError
    assert done == [] if ends else ["rank 1 (node 0): NCCL does not end, so this process does"]


def test_who_is_stuck_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(live_nccl, "_STUCK_SECONDS", 0.01)
    monkeypatch.setattr(live_nccl, "end_this_process", said.append)
    with live_nccl.ended_if_stuck("rank 1 (node 0)"):
        time.sleep(0.2)
    assert said == ["rank 1 (node 0): NCCL does not connect, so this process ends"]


def test_in_a_live_recovery_a_process_keeps_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of three is lost: what was rank 2 is rank 1 from now on, and a new process comes last."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    for local_rank, member, number in ((0, "0.0@0", 0), (1, "2.0@0", 2), (2, "1.1@0", 1), (0, "3.0@5", 3)):
        world = World(local_rank, 3, local_rank, 3, member=member, members_at="here:1/list")
        assert process_group.local_device(world, "cuda").index == number
