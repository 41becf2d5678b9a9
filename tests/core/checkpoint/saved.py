"""What tests save of checkpoints, and what they look for in a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_core.checkpoint import Checkpoint, Checkpointer, find_checkpoints, load
from tests.core.checkpoint.children import state_of

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "checkpoints.md"


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return bool(type(left) is type(right) and left == right)


def trained() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LazyLinear(4))
    model(torch.randn(2, 3, 8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 8, 8)).square().sum().backward()
        optimizer.step()
        schedule.step()
    return model, optimizer, schedule


def steps_in(directory: Path) -> list[int]:
    return [checkpoint.step for checkpoint in find_checkpoints(directory)]


def save_steps(checkpointer: Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save(state_of(step), step=step, epoch=0)


def saved(directory: Path, *steps: int) -> list[Checkpoint]:
    """Save checkpoints of these steps; return them, the newest first."""
    checkpointer = Checkpointer(directory, keep_last=100)
    for step in steps:
        checkpointer.save(state_of(step), step=step, epoch=0, metadata={"experiment": "abc"})
    return find_checkpoints(directory)


def is_whole(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint loads, and every number in it belongs to its step."""
    return same(load(checkpoint), state_of(checkpoint.step))


def leftovers(directory: Path) -> set[str]:
    committed = {name for each in find_checkpoints(directory) for name in (each.file, each.manifest.name)}
    return {path.name for path in directory.iterdir()} - committed - {"latest.json", "best.json"}
