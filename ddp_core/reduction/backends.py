"""Which exchange each backend gets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .collectives import BatchedMessages, CollectiveExchange
from .exchange import Exchange
from .messages import PointToPoint


def exchange_on(group: dist.ProcessGroup, device: torch.device, tag: int = 0) -> Exchange:
    """The exchange between all ranks of the group for tensors on `device`; for `tag` see `PointToPoint`."""
    return CollectiveExchange(group) if _backend(group, device) == "nccl" else PointToPoint(group, tag=tag)


def exchange_among(group: dist.ProcessGroup, device: torch.device, members: Sequence[int], tag: int) -> Exchange:
    """The exchange between these ranks of the group for tensors on `device`; for `tag` see `PointToPoint`."""
    if _backend(group, device) == "nccl":
        return BatchedMessages(group, members)
    return PointToPoint(group, members, tag)


def connect(exchange: Exchange, device: torch.device) -> None:
    """NCCL connects ranks in the first collective of all; after that some may send to each other."""
    cuts = [slice(rank, rank + 1) for rank in range(exchange.world_size)]
    exchange.gather([(torch.zeros(exchange.world_size, device=device), cuts)])


def goes_through_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether tensors on `device` are to be copied to host memory (`host_memory`) before they are exchanged."""
    return device.type != "cpu" and _backend(group, device) == "gloo"


def carries_host_memory(group: dist.ProcessGroup) -> bool:
    """Whether the group sums tensors in host memory, which one of NCCL alone does not."""
    return "cpu" in _backends(group)


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    return _backends(group)[device.type]


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    # Such as "cpu:gloo,cuda:nccl".
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
