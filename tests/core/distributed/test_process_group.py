"""The process group without GPUs: ranks agree on a backend by the names of their GPUs, and NCCL's failures end waits.

Ranks are threads here, GPUs are names, and NCCL is feigned.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_core.base.errors import UserError
from ddp_core.distributed import process_group
from ddp_core.distributed.process_group import Collectives, agreed_backend
from ddp_core.distributed.world import World
from tests.core.distributed.feigned_nccl import done
from tests.support.wording import refusing

__all__ = ["done"]

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
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], uuids: list[str], asked: str, expected: str
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
        with refusing():
            raise refusal  # type: ignore[misc]


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


def collectives(device: str = "cuda") -> Collectives:
    return Collectives(World(0, 2), torch.device(device))


@pytest.mark.parametrize(
    ("device", "error", "expected"),
    [("cuda", KeyError, "aborted"), ("cuda", None, "destroyed"), ("cpu", KeyError, "destroyed")],
)
def test_after_an_error_nccl_is_aborted_once_and_not_waited_for(
    device: str, error: type[Exception] | None, expected: str, done: list[str]
) -> None:
    ours = collectives(device)
    with contextlib.suppress(KeyError), ours.abandoned_on_error(), ours.abandoned_on_error():
        if error is not None:
            raise error
    ours.end()
    assert done == [expected]


@pytest.mark.usefixtures("done")
def test_a_wait_for_the_device_ends_when_nccl_has_failed_also_where_the_device_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An abort ends NCCL's kernels, so that the device goes on without what they should have received."""
    monkeypatch.setattr(process_group, "nccl_failure", lambda _: "TIMEOUT")
    reached: Any = SimpleNamespace(query=lambda: True)
    with refusing(dist.DistBackendError):
        collectives().await_event(reached)
