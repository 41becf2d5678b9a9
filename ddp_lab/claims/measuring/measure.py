"""Timing, for ranks and for single processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist


def timed_rounds(ways: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Seconds of each way in each round, by name: A B, then B A, then A B, and so on.

    `warm_up` rounds before are not kept. Where there is a process group all ranks call this alike: they set out
    together, and the slowest rank's seconds count, on every rank.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(-warm_up, rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            taken = timed(ways[name])
            if turn >= 0:
                seconds[name].append(taken)
    return seconds


def timed(action: Callable[[], Any]) -> float:
    """Seconds of one call, on the slowest rank, from when all have set out."""
    _settle()
    together = dist.is_initialized() and dist.get_world_size() > 1
    if together:
        dist.all_reduce(torch.zeros(1))
    began = time.perf_counter()
    action()
    _settle()
    taken = time.perf_counter() - began
    if not together:
        return taken
    slowest = torch.tensor([taken], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _settle() -> None:
    """CUDA works on after its calls return: wait for it."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
