"""A process group whose ranks are threads, as torch's own tests have it: what torch does with a group runs for real.

So `fully_shard` and the collectives of `torch.distributed` can be tested in milliseconds. torch's group of threads has
no messages between two ranks; those of `ddp_core.reduction` go over the wires of `thread_group`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup, ThreadLocalWorld

from tests.support.thread_group import ThreadGroup, Wires

GATHERS: list[Any] = []
"""The device and the timeout of each group that was asked for to gather parameters."""


def on_thread_world(world_size: int, function: Callable[[Any], Any]) -> list[Any]:
    """Call `function(group)` on each rank of a new group; the results by rank, or the error of the first that fails.

    All ranks draw from one random generator: make models before.
    """
    store, wires = dist.HashStore(), Wires()
    ends = SimpleNamespace(is_initialized=lambda: True, destroy_process_group=lambda _: None)

    def own_group(group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None) -> Any:
        own = ThreadGroup(wires, group.rank(), group.size())
        own.asked = (device, timeout)
        return own

    def run(rank: int) -> Any:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            return function(dist.group.WORLD)
        except BaseException as error:
            # The others, which wait for this rank, end with SystemExit.
            ProcessLocalGroup.exception_handle(error)
            raise
        finally:
            dist.destroy_process_group()

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(world_size) as threads:
        patch.setattr(dist.distributed_c10d, "_world", ThreadLocalWorld())
        patch.setattr("ddp_core.reduction.communication.own_group", own_group)
        patch.setattr("ddp_core.reduction.communication.dist", ends)
        # Gathers of parameters need no group of their own where all of a rank's collectives are called by its thread.
        patch.setattr("ddp_core.sharding.rows.own_group", lambda group, *asked: GATHERS.append(asked) or group)
        patch.setattr("ddp_core.sharding.rows.gather_by_messages", lambda *_: None)
        patch.setattr("ddp_core.reduction.backends._backends", lambda _: {"cpu": "gloo"})
        _set_thread_isolation_mode(True)
        ProcessLocalGroup.reset()
        try:
            futures = [threads.submit(run, rank) for rank in range(world_size)]
            errors = [error for future in futures if (error := future.exception()) is not None]
        finally:
            _set_thread_isolation_mode(False)
        if errors:
            raise next((error for error in errors if isinstance(error, Exception)), errors[0])
        assert wires.nothing_is_left()
        return [future.result() for future in futures]
