"""Which backend carries the tensors of a launch: decided from the GPUs that its ranks really have, alike on all ranks.

NCCL refuses ranks that share a GPU. Whether they do cannot be seen from the number of visible GPUs: a scheduler may
show each rank one GPU, either a GPU of its own or the same for all. So the ranks compare the UUIDs of their GPUs.
Not run on a GPU yet.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict

import torch
import torch.distributed as dist

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.distributed.world import World

_SHARED = "ranks that share a GPU"


def agreed_backend(store: dist.Store, world: World, device: torch.device, backend: str) -> str:
    """The backends by device type, in torch's own notation: gloo, or for ranks with a GPU each nccl.

    `store` is the launch's; `backend` is auto, gloo or nccl. Every rank calls this once. Rank 0 says it where ranks
    share a GPU. Raises UserError (4), on every rank with a GPU, where nccl was asked for and ranks share one, and
    DistError where a rank does not answer within the store's timeout.
    """
    store.set(f"device/{world.rank}", _identity(device))
    if world.is_first:
        devices = store.multi_get([f"device/{rank}" for rank in range(world.world_size)])
        store.set(_SHARED, json.dumps(_sharing([name.decode() for name in devices])))
    if device.type == "cpu":
        return "gloo"
    sharing: list[list[int]] = json.loads(store.get(_SHARED))
    if sharing and backend == "nccl":
        raise UserError(
            f"ranks {_listed(sharing[0])} share a GPU, and nccl needs one for each rank: use --backend gloo or auto",
            ExitCode.RESOURCES,
        )
    if sharing and world.is_first:
        groups = "; ".join(f"ranks {_listed(ranks)} share a GPU" for ranks in sharing)
        print(f"{groups}: the ranks exchange over gloo, which is slower than nccl", file=sys.stderr)
    return "cpu:gloo,cuda:gloo" if sharing or backend == "gloo" else "cpu:gloo,cuda:nccl"


def _identity(device: torch.device) -> str:
    """What only this device is called; empty for a CPU."""
    return "" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def _sharing(devices: list[str]) -> list[list[int]]:
    """The ranks of each GPU that several ranks have, by the names of all ranks' devices."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, name in enumerate(devices):
        ranks[name].append(rank)
    return [members for name, members in ranks.items() if name and len(members) > 1]


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
