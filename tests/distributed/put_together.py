"""The whole of a state of which each rank has a part, by way of what their data files hold."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ddp_core.checkpoint.parts import part_of, put_together


def whole_of(state: Any) -> Any:
    """The whole state, on every rank; a collective."""
    content, shapes = part_of(state, dist.get_rank() == 0)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (content, shapes))
    return put_together([content for content, _ in everyones], everyones[0][1])
