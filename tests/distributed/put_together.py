"""The whole of a state of which each rank has a part, by way of a checkpoint."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import torch.distributed as dist

from ddp_core.checkpoint import Checkpointer, Ranks, load, newest_valid


def whole_of(state: Any) -> Any:
    """What all ranks of the default process group have saved together, on every rank; a collective."""
    rank = dist.get_rank()
    place = [tempfile.mkdtemp(prefix="ddp-test-") if rank == 0 else ""]
    dist.broadcast_object_list(place)
    try:
        with Ranks.meeting(f"rank {rank}", 60) as ranks, Checkpointer(place[0], ranks=ranks) as checkpointer:
            checkpointer.save(state, step=1, epoch=0)
        checkpoint = newest_valid(place[0])
        assert checkpoint is not None
        whole = load(checkpoint)
        dist.barrier()
        return whole
    finally:
        if rank == 0:
            shutil.rmtree(place[0])
