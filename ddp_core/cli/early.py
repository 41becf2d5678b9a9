"""What `ddp train` can refuse before it loads torch, which takes seconds: a directory or a port that is in use."""

from __future__ import annotations

from pathlib import Path

from ddp_core.config.options import Asked
from ddp_core.distributed.addresses import address_served, require_port
from ddp_core.distributed.world import World
from ddp_core.record.lock import require_unlocked


def require_free(asked: Asked, world: World) -> None:
    """Refuse a request whose run directory or port another process has.

    What is free now may be taken a moment later: the run itself asks again, and keeps both.

    Raises UserError (2) where another run works in the directory to resume, and (4) where rank 0's port is in use.
    """
    if world.serves_store and asked.layout == "ddp":
        assert world.store_port is not None
        address = address_served(str(world.store_host))
        require_port(address, world.store_port, world.port_name, "give the ranks another one")
    elif not World.is_set() and asked.resume not in ("auto", "never") and asked.nnodes.high == 1:
        # A worker of a launcher outside, or one of several nodes, may find the directory in use by its own launch.
        require_unlocked(Path(asked.resume))
