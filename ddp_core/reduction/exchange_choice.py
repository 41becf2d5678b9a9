"""Which exchange suits which backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .collectives import Batches, Collectives
from .exchange import Exchange, WholeExchange
from .host_memory import ThroughHost
from .messages import PointToPoint


def exchange_on(group: dist.ProcessGroup, device: torch.device) -> WholeExchange:
    """The exchange between all ranks of the group for tensors on `device`."""
    return Collectives(group) if _backend(group, device) == "nccl" else _messages(group, device)


def exchange_among(group: dist.ProcessGroup, device: torch.device, members: Sequence[int], tag: int) -> Exchange:
    """The exchange between these ranks of the group for tensors on `device`; for `tag` see `PointToPoint`."""
    if _backend(group, device) == "nccl":
        return Batches(group, members)
    return _messages(group, device, members, tag)


def _messages(
    group: dist.ProcessGroup, device: torch.device, members: Sequence[int] | None = None, tag: int = 0
) -> WholeExchange:
    messages = PointToPoint(group, members, tag)
    return ThroughHost(messages) if device.type != "cpu" and _backend(group, device) == "gloo" else messages


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    # Such as "cpu:gloo,cuda:nccl".
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))[device.type]
