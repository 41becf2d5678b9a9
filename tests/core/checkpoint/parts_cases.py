"""A state that is cut among ranks, and ranks that save it: in threads, or in processes that may be killed.

The children import this module, so it imports little.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ddp_core.checkpoint import Checkpoint, Checkpointer, CutTensor, Ranks, find_checkpoints, load

Value = TypeVar("Value")


def whole_state(step: int) -> dict[str, Any]:
    """A state as one process has it, with tied, transposed, empty and single numbers."""
    weight = torch.arange(24.0).view(4, 6) + step
    weights: OrderedDict[str, Any] = OrderedDict(
        weight=weight,
        again=weight,
        turned=(torch.arange(40.0, dtype=torch.float64).view(5, 8) - step).t(),
        none=torch.empty(0, 3),
        number=torch.tensor(float(step)),
        statistics=torch.full((7,), float(step)),
    )
    state = {0: {"momentum": weight * 2, "step": torch.tensor(step)}, 2: {"momentum": None}}
    return {"model": weights, "optimizer": {"state": state, "betas": (0.9, 0.999)}, "step": step}


def cut_state(step: int, rank: int, world_size: int) -> dict[str, Any]:
    """What one rank has of this state: neighbouring elements of every parameter, and of the momentum."""
    state = whole_state(step)
    cuts = {name: _cut(state["model"][name], rank, world_size) for name in ("weight", "turned", "none", "number")}
    state["model"] |= {**cuts, "again": cuts["weight"]}
    momentum = state["optimizer"]["state"][0]["momentum"]
    state["optimizer"]["state"][0]["momentum"] = _cut(momentum, rank, world_size)
    return state


def _cut(whole: Tensor, rank: int, world_size: int) -> CutTensor:
    start, stop = (whole.numel() * each // world_size for each in (rank, rank + 1))
    values = whole.as_strided((whole.numel(),), (1,))[start:stop]
    # What has no elements is one rank's alone.
    pieces = {start: values} if values.numel() or rank == 0 else {}
    return CutTensor(whole.dtype, tuple(whole.shape), whole.stride(), pieces)


class ThreadRanks(Ranks):
    """A rank that is a thread of this process."""

    def __init__(self, rank: int, meeting: threading.Barrier, values: list[Any]) -> None:
        self.rank, self.count, self.place = rank, len(values), f"rank {rank}"
        self._meeting, self._values = meeting, values

    def gather(self, own: Value) -> list[Value]:
        self._values[self.rank] = own
        self._meeting.wait()
        values = list(self._values)
        self._meeting.wait()
        return values

    def hear_first(self, own: Value) -> Value:
        return self.gather(own)[0]


def in_threads(work: Callable[[ThreadRanks], Any], count: int) -> list[Any]:
    """What `work` returns or raises on each of `count` ranks."""
    meeting, values = threading.Barrier(count, timeout=60), [None] * count
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(work, ThreadRanks(rank, meeting, values)) for rank in range(count)]
        return [future.exception() or future.result() for future in futures]


def save_in_parts(directory: Path, ranks: Ranks, *steps: int, **settings: Any) -> None:
    """Save the state of these steps as one of the ranks."""
    with Checkpointer(directory, ranks=ranks, **settings) as checkpointer:
        for step in steps:
            state = cut_state(step, ranks.rank, ranks.count)
            checkpointer.save(state, step=step, epoch=0, best=True, metadata={"ranks": ranks.count})


def described(state: Any) -> Any:
    """A state in a form that can be compared, with the strides of its tensors."""
    if isinstance(state, torch.Tensor):
        return (str(state.dtype), tuple(state.shape), state.stride(), state.tolist())
    if isinstance(state, dict):
        return (type(state), [(key, described(value)) for key, value in state.items()])
    return [described(value) for value in state] if isinstance(state, list | tuple) else state


def save(directory: Path, count: int, *steps: int, **settings: Any) -> list[Checkpoint]:
    """Save these steps by `count` ranks; return all checkpoints, the newest first."""
    ended = in_threads(lambda ranks: save_in_parts(directory, ranks, *steps, **settings), count)
    assert ended == [None] * count
    return find_checkpoints(directory)


def is_whole(checkpoint: Checkpoint | None) -> bool:
    return checkpoint is not None and described(load(checkpoint)) == described(whole_state(checkpoint.step))


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {"latest.json", "best.json", "fence.json", "fence.lock"}


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(content)
