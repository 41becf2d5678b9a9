"""A process group that seems to be one of NCCL, and an event of a device."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from ddp_core.distributed import process_group


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done to the process group, which seems to be one of NCCL."""
    found: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "destroy_process_group", lambda: found.append("destroyed"))
    monkeypatch.setattr(process_group, "abort_process_groups", lambda _: found.append("aborted"))
    return found


class Event:
    """An event that the device reaches at the third look."""

    def __init__(self) -> None:
        self.looks = 0

    def query(self) -> bool:
        self.looks += 1
        return self.looks > 2
