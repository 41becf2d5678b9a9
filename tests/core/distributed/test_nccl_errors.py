"""What is done about NCCL's failures, without NCCL: the device is waited for with open eyes, and groups are aborted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_core.distributed import process_group
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.world import World


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
