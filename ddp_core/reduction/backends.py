"""Which exchange suits which backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .collectives import Batches, Collectives
from .exchange import Exchange, WholeExchange
from .messages import PointToPoint


def exchange_on(group: dist.ProcessGroup, device: torch.device) -> WholeExchange:
    """The exchange between all ranks of the group for tensors on `device`."""
    return Collectives(group) if _is_nccl(group, device) else PointToPoint(group)


def exchange_among(group: dist.ProcessGroup, device: torch.device, members: Sequence[int], tag: int) -> Exchange:
    """The exchange between these ranks of the group for tensors on `device`; for `tag` see `PointToPoint`."""
    return Batches(group, members) if _is_nccl(group, device) else PointToPoint(group, members, tag)


def _is_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    # Such as "cpu:gloo,cuda:nccl".
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return backends[device.type] == "nccl"
